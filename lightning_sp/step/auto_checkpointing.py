"""`activation_checkpointing="auto"`: before the first step and each longer one, the cheapest policy whose predicted peak fits the budget.

The ranks choose together, by the largest peak and the smallest budget of all, so that all follow one policy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_sp import comm
from lightning_sp.config import StrategyConfig
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.errors import SequenceParallelError
from lightning_sp.loss.output_head.chunked_head import chunk_bytes
from lightning_sp.loss.output_head.deferred_heads import defers_logits
from lightning_sp.parallelize import BlockCheckpoints, block_checkpoints
from lightning_sp.parallelize.memory.memory_budget import budget_bytes
from lightning_sp.parallelize.memory.memory_prediction import GIB, Moment, StepBytes, cheapest_policy, moments
from lightning_sp.parallelize.memory.model_bytes import model_bytes, step_of_shapes, vocabulary_of
from lightning_sp.step.runner import StepRunner


class AutoCheckpointing:
    """Follows the lengths of a run's batches; a class because a choice holds until a batch is longer.

    Attributes:
        most_tokens: of a rank, above which a batch is looked at.
        longest: tokens of a rank that the policy which needs least holds within the budget; 0 before the first step.
    """

    def __init__(self, config: StrategyConfig) -> None:
        self._config, self._budget_gib, self._waits = config, config.memory_budget_gib, False
        self.most_tokens = 0 if config.checkpoint_policy == "auto" else sys.maxsize
        self.longest = 0

    def before_step(
        self, runner: StepRunner, batch: SequenceInfo, optimizers: Sequence[Optimizer], ranks_on_machine: int
    ) -> None:
        """Choose a policy if the batch is longer than those before, on some rank. Every rank must call it.

        Communicates: then one all_reduce of 352 bytes on the host, of 304 where blocks are compiled.

        Raises:
            SequenceParallelError: the user's budget is smaller than every peak that is predicted of a measured step.
        """
        module, device, given = runner.module, runner.device, self._budget_gib
        trainer: Any = module.trainer
        checkpoints = block_checkpoints(module)
        measured = checkpoints.activations.step
        waits, self._waits = self._waits and measured is not None, False
        if not batch.is_longer and not waits:
            return
        if not checkpoints.blocks:
            self.most_tokens = sys.maxsize
            return
        in_backward = self._config.optimizer_in_backward
        whole = self._config.accumulates_whole and trainer.accumulate_grad_batches > 1
        model = model_bytes(
            module, checkpoints.blocks, optimizers, device, steps_in_backward=in_backward, accumulates_whole=whole
        )
        words = vocabulary_of(module, checkpoints.blocks)
        loss = chunk_bytes(words, self._config.loss_chunk_tokens, batch.local_tokens, device)
        model = replace(model, loss=loss)
        step = measured or self._estimated(module, checkpoints)
        step = step.offering(tiles=checkpoints.can_tile(runner.context.global_view), horizon=checkpoints.horizon)
        budget = budget_bytes(device, ranks_on_machine) if given == "auto" else int(given * GIB)
        candidates = checkpoints.candidates
        own = [each for policy in candidates for each in moments(policy, step, model)]
        numbers = [-budget, batch.local_tokens, *(number for each in own for number in (each.fixed, each.per_token))]
        budget, tokens, *numbers = comm.largest(torch.tensor(numbers), runner.groups.world).tolist()
        of_all = [Moment(fixed=a, per_token=b) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
        num = len(of_all) // len(candidates)
        policies = [of_all[first : first + num] for first in range(0, len(of_all), num)]
        budget, peaks = -budget, [max(each.at(tokens) for each in policy) for policy in policies]
        hold = [min((budget - each.fixed) // max(1, each.per_token) for each in policy) for policy in policies]
        self.longest = max(0, *hold)
        policy = cheapest_policy(candidates, peaks, budget)
        if policy is None:
            self._nothing_fits(peaks, budget, tokens, checkpoints, estimated=measured is None)
            policy = candidates[peaks.index(min(peaks))]
        chosen, before = candidates.index(policy), checkpoints.policy
        self.most_tokens = max(tokens, hold[chosen])
        # Without a preflight this step is measured, and the next one is chosen for anew.
        self._waits = measured is None and policy == "none"
        checkpoints.use("auto" if self._waits else policy)
        if policy not in ("none", before):
            options = ", ".join(f"{name}={value}" for name, value in checkpoints.as_options(policy).items())
            rank_zero_info(
                f"sequence_parallel: {options} from this step on: {tokens:,} tokens of a rank are predicted to need "
                f"{peaks[chosen] / GIB:.2f} GiB, {peaks[0] / GIB:.2f} without, of a budget of {budget / GIB:.2f}"
            )

    def _estimated(self, module: Any, checkpoints: BlockCheckpoints) -> StepBytes:
        # A loss of a head's logits makes a chunk of them at a time, which is counted by itself.
        in_chunks = self._config.loss_chunk_tokens is not None and defers_logits(module)
        precision, tiles = module.trainer.precision, checkpoints.tiles
        return step_of_shapes(module, checkpoints.blocks, precision, tiles, logits=not in_chunks)

    def _nothing_fits(
        self, peaks: Sequence[int], budget: int, tokens: int, checkpoints: BlockCheckpoints, *, estimated: bool
    ) -> None:
        least = min(peaks)
        options = checkpoints.as_options(checkpoints.candidates[peaks.index(least)])
        message = (
            f"{tokens:,} tokens of a rank are predicted to need {least / GIB:.2f} GiB at least, with "
            f"{', '.join(f'{name}={value!r}' for name, value in options.items())}, of a budget of {budget / GIB:.2f} "
            f"(memory_budget_gib={self._budget_gib}), in which {self.longest:,} fit: split a sequence over "
            "more ranks (sequence_parallel_size), shard parameters over more (shard_size), exchange heads in stages (ulysses_stages), or "
            "take shorter sequences or fewer rows"
        )
        if estimated:
            # Of a step of which no number is known a user may know better.
            rank_zero_warn(f"{message}. It is estimated by the shapes of parameters alone: no step was measured")
        elif self._budget_gib != "auto":
            raise SequenceParallelError(message)
        else:
            rank_zero_warn(message)
