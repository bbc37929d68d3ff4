"""A user's steps on sharded batches: attention and loss are intercepted from a step's start until its backward has ended.

training: its loss is the mean over the world, checked          evaluation: over this sample's ranks alone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sp import comm
from lightning_sp.attention.plan.block_sparsity import search_once
from lightning_sp.checkpoint import random_state, restore_random_state
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.context.streams import mixed_seed, streams_from
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.batch import global_batch
from lightning_sp.loss.check import LossCheck, check_sums
from lightning_sp.loss.operations import SeenOperations
from lightning_sp.loss.output_head.deferred_logits import is_deferred, make_logits
from lightning_sp.loss.reduction import mean_of_returned_sum
from lightning_sp.mesh import SequenceMesh
from lightning_sp.parallelize import (
    RootUnit,
    activation_offload,
    check_hooks,
    is_compiled,
    is_measured,
    measured_step,
    optional_units,
    refuses_measuring,
    refuses_own_steps,
    reshard,
    run_with_whole_parameters,
    used_parameters,
    with_backward_hooks,
)
from lightning_sp.rewrite import WholeAttention
from lightning_sp.step.non_finite import explain_non_finite
from lightning_sp.step.results.predictions import unshard_tokens
from lightning_sp.trainer.logged_numbers.row_metrics import make_whole

_NO_ATTENTION = (
    "the step made 0 attention calls that lightning_sp could see: every rank would attend to its own part alone; the model must call "
    "F.scaled_dot_product_attention or flex_attention, use torch's nn.MultiheadAttention with need_weights=False, or be a Hugging Face model "
    "with the attention interface; global_view=True carries attention that is written out"
)
_NOT_OF_THE_SEQUENCE = (
    "all attention calls of the step are over as many tokens whatever the length of the batch: of an array of the model's own, or of a step "
    "that cuts its tokens to a number, ids[:, :512] say, where each rank would cut its own part; global_view=True shows the step whole "
    "sequences, or cut them in the collate function"
)


class StepRunner:
    """Runs the steps of one model; a class because attention is looked for once and losses are compared from step to step.

    Args:
        module: the model.
        context: what the interceptions share.
        groups: for values on the host.
        device: where the model is.
        read_ahead: says of the module whether a hook of the user's reads weights between a training step and its backward.
    """

    def __init__(
        self,
        module: nn.Module,
        context: SequenceContext,
        *,
        groups: comm.HostGroups,
        device: torch.device,
        read_ahead: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        self.module = module
        self.context = context
        self.groups = groups
        self.device = device
        self._read_ahead = read_ahead
        self._attention_reached = False
        self._counts_later_steps = True
        self._operations = SeenOperations()
        self._loss_check = LossCheck(self._operations)
        self._was_finite = True
        self._root_unit = RootUnit(module)
        self._looks_at_hooks = True
        self._of_whole_rows = ExitStack()  # of a step in progress that holds no sequence

    def shown(self, batch: Any, info: SequenceInfo) -> Any:
        """Return this rank's part of a batch as the step sees it: in the global view in tensors that show the whole."""
        if not self.context.global_view or info.is_whole or info.layout.size == 1:
            return batch
        mesh = self.context.run_mesh
        return global_batch(
            batch, info, rank=mesh.sequence_rank, group=mesh.sequence_group, attend=WholeAttention(self.context),
            note_reduction=self._note_reduction, agree=self._agree, own_draws=self._own_draws,
            draws_whole=self.context.trial_seed is not None,
        )  # fmt: skip

    def _note_reduction(self) -> None:
        if self.context.loss_step is not None:
            self.context.loss_step.num_reductions += 1

    def _own_draws(self) -> AbstractContextManager[None]:
        """Draw this rank's own numbers within. Where they begin is drawn alike, so that what is recomputed draws the same."""
        begin = int(torch.randint(2**62, ()))
        return streams_from(mixed_seed(begin, self.context.run_mesh.sequence_rank), self.device)

    def _agree(self, error: str | None) -> None:
        """Raise what a rank refuses on all ranks of its sequence. Other groups have other masks, say, and may not ask."""
        comm.agree(error, self.context.run_mesh.sequence_group)

    def start_run(self) -> None:
        """Compare the next loss as the first one, before its backward."""
        self._loss_check = LossCheck(self._operations)
        # Compiled code counts no attention calls.
        self._counts_later_steps = not is_compiled(self.module)

    def end_fit(self) -> None:
        """End a fit as `end_run`; the next one explains a loss that is not finite anew."""
        self.end_run()
        self._was_finite = True

    def judge_last_loss(self) -> None:
        """Read the answer about the last loss, which a trial of the next batch would lose. Every rank must call it.

        Raises:
            SequenceParallelError: the losses of ranks that share a sequence differed.
        """
        self._loss_check.finish(self.context.run_mesh, self.groups.world)

    def end_run(self) -> None:
        """Read the answers about the last loss and the last backward. Every rank must call it."""
        self.judge_last_loss()
        if (used := used_parameters(self.module)) is not None:
            used.finish()

    def train(self, batch: SequenceInfo, run: Callable[[], Any]) -> Any:
        """Run training_step and leave the step open for its backward; `end` closes it.

        Args:
            batch: what was sharded.
            run: the user's training_step on this rank's part.

        Returns:
            What the step returned; a returned sum and count are a mean over the world's tokens.

        Raises:
            SequenceParallelError: attention was not reached, a sequence's ranks differ in the loss, or a parameter was used where not whole.
        """
        if not self._attention_reached:
            check_hooks(self.module, "_backward_hooks")  # those that were registered after the model was sharded
        self._tell_of_backward_hooks(batch)
        before = random_state() if is_measured(self.module) else {}
        try:
            return self._train(batch, run)
        except RuntimeError as error:
            if not refuses_measuring(self.module, error):
                raise
        self.end_without_backward()
        restore_random_state(before)
        return self._train(batch, run)

    def _tell_of_backward_hooks(self, batch: SequenceInfo) -> None:
        """Warn of modules whose backward hooks have this rank's part: at a first step, and behind each trial, for hooks may be new there."""
        if (tried := self.context.is_tried) or not self._looks_at_hooks or batch.is_whole:
            self._looks_at_hooks |= tried
            return
        self._looks_at_hooks, size = False, batch.layout.size
        if size > 1 and not self.context.global_view and (names := with_backward_hooks(self.module)):
            rank_zero_warn(
                f"{len(names)} backward hooks of modules ({', '.join(names[:3])}) have the gradients of this rank's part of the tokens, "
                f"which are {size} times as large, for the ranks' are averaged: what they keep of them is not one device's. "
                f"self.trainer.strategy.unshard(gradient) / {size} in the hook, on every rank, is the whole (rows, tokens, ...) of its rows"
            )

    def _train(self, batch: SequenceInfo, run: Callable[[], Any]) -> Any:
        step = self._begin(batch, None)
        if batch.uneven_entries:
            self._gather_optional()
        by_hand = not getattr(self.module, "automatic_optimization", True)
        measured = measured_step(self.module, batch.local_tokens)
        optimized = self._root_unit.used_again() if by_hand else refuses_own_steps(self.module)
        with self._counted(step), optimized, measured:
            output = self._run(run)
        self._root_unit.keep_written()
        if self._read_ahead(self.module):
            reshard(
                self.module
            )  # a hook finds every weight as a shard, as other hooks do; the backward gathers what it needs
        if (offload := activation_offload(self.module)) is not None:
            offload.check_room(self.groups.world)
        self._check_reached(step)
        output, counts = mean_of_returned_sum(output, step.summed_over, is_filler=batch.is_filler)
        if counts is not None:
            step.token_counts, step.means = counts, []
        self._check_loss(step, output)
        return output

    def _run(self, run: Callable[[], Any]) -> Any:
        output = run_with_whole_parameters(run)
        for each in self.context.at_step_end:
            each()
        if self.context.global_view:
            make_whole(self.module)
        return tree_map(make_logits, output) if any(map(is_deferred, tree_leaves(output))) else output

    def before_backward(self, loss: Tensor) -> Tensor:
        """Check a loss of manual optimization, inside its step, and return it ready for its backward. Every rank must call it."""
        step = self.context.loss_step
        if step is None:
            return loss
        self._check_loss(step, loss)
        return self._root_unit.prepare_backward(loss)

    def _check_loss(self, step: Step, output: Any) -> None:
        if self.context.mesh.base.size() > 1:
            is_tried = self.context.trial_seed is not None
            self._loss_check.check(step, output, self.context.run_mesh, self.groups.world, is_tried=is_tried)

    def check_sums(self) -> None:
        """Refuse a step of which it is not known over which rows its sums of cross entropies are; not one that is tried to find out."""
        if self.context.loss_step is not None:
            check_sums(self.context.loss_step, self.context)

    def evaluate(self, batch: SequenceInfo, run: Callable[[], Any]) -> Any:
        """Run an evaluation step; its loss is a mean over this sample's ranks, for other groups may have no batch left.

        Args:
            batch: what was sharded.
            run: the user's step on this rank's part.
        """
        step = self._begin(batch, self.context.mesh.sequence_group)
        try:
            if batch.uneven_entries:
                self._gather_optional()
            with self._counted(step):
                output = self._run(run)
                self._root_unit.keep_written()
        finally:
            self.end_without_backward()
        self._check_reached(step)
        self._loss_check.check_rows(step, self.context.mesh, self.groups.world)
        return output

    def unshard(self, tensor: Tensor, batch: SequenceInfo | None, mesh: SequenceMesh, *, dim: int) -> Tensor:
        """Return whole sequences of a step's tokens; a reference run has whole ones. As `unshard_tokens`."""
        if self.context.reference is not None or (batch is not None and batch.is_whole):
            return tensor
        if self.context.step is not None:
            self.context.step.num_reductions += 1
        return unshard_tokens(tensor, batch, mesh, self.groups, dim=dim)

    @property
    def has_new_operations(self) -> bool:
        """Whether the last training loss is made of operations that none before was, and nothing has compared; the same on all ranks."""
        return self._loss_check.last_has_new_operations()

    @property
    def operations_are_shown(self) -> bool:
        """Whether trials have shown all operations that this rank's losses were made of."""
        return self._operations.are_shown

    @property
    def is_to_explain(self) -> bool:
        """Whether `end_backward` will run the step in progress once more, with the weights that made its loss; the same on all ranks."""
        return self._was_finite and not self._loss_check.last_is_finite()

    def end_backward(self, run: Callable[[], Any]) -> None:
        """End a step after its backward; where its loss is nan or infinite and the last one was not, warn of the layer that made it.

        Args:
            run: as `train` was given, on the batch as it was before the step.
        """
        step = self.context.loss_step
        self.end()
        if (used := used_parameters(self.module)) is not None:
            used.check_reduced()
        was_finite, self._was_finite = self._was_finite, self._loss_check.last_is_finite()
        if step is None or self._was_finite or not was_finite:
            return
        if all(comm.gather_objects(any(not count for count in step.token_counts), self.groups.world)):
            why = "a mean cross entropy has no target, for all of this micro-batch are ignored; its gradient is zeros"
        else:
            why = explain_non_finite(
                self.module, lambda: self._run_again(step.batch, run), self.device, self.groups.world
            )
        rank_zero_warn(
            f"training_step's loss is nan or infinite; {why}. Training goes on, as on one device; "
            "EarlyStopping(check_finite=True) or Trainer(detect_anomaly=True) end it there"
        )

    def _run_again(self, batch: SequenceInfo, run: Callable[[], Any]) -> Tensor | None:
        """Run the forward of a training step once more and return its loss."""
        self._begin(batch, None)
        try:
            if batch.uneven_entries:
                self._gather_optional()
            # Ranks that split weights find what is not finite in other places, and one that has found it looks at no logits any more.
            at_once = (
                self.context.logits_made_at_once() if self.context.mesh.tensor_parallel_size > 1 else nullcontext()
            )
            with torch.compiler.set_stance("force_eager"), at_once:
                output, _ = mean_of_returned_sum(self._run(run), None)
        finally:
            self.end_without_backward()
        loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
        return loss

    def end(self) -> None:
        """Give every intercepted function back its own behaviour."""
        self.context.end()
        search_once(is_on=False)
        self._of_whole_rows.close()
        optional_units(self.module).release()

    def close(self) -> None:
        """End a run, whether it has succeeded or not."""
        self.end()
        if (offload := activation_offload(self.module)) is not None:
            offload.close()

    def end_without_backward(self) -> None:
        """End a step of which no backward is to come: one of evaluation, or of manual optimization."""
        self.end()
        # FSDP2 leaves the root's parameters whole after such a forward: a hook that swaps weights then, an average's, would miss them.
        reshard(self.module)

    def _begin(self, batch: SequenceInfo, loss_group: dist.ProcessGroup | None) -> Step:
        self._root_unit = RootUnit(self.module)
        self._root_unit.note_switches()
        mesh, added = self.context.run_mesh, self.context.adds_up_rows
        step = Step(batch=batch, loss_group=loss_group, token_group=mesh.token_group, adds_up_rows=added)
        self.context.begin(step)
        search_once(is_on=True)
        if batch.is_whole:
            self._run_whole(batch)
        elif self.context.global_view and batch.layout.size > 1:
            self._of_whole_rows.close()
            seed = batch.seed if self.context.trial_seed is None else self.context.trial_seed
            self._of_whole_rows.enter_context(streams_from(seed, self.device))
        return step

    def _run_whole(self, batch: SequenceInfo) -> None:
        """Until the step's end let a model have its own attention, and the ranks of a sequence draw alike: they run the same rows."""
        self._of_whole_rows.close()
        for own in self.context.in_reference:
            self._of_whole_rows.enter_context(own())
        seed = batch.seed if self.context.run_mesh.layout.size > 1 else None
        self._of_whole_rows.enter_context(streams_from(seed, self.device))

    def _gather_optional(self) -> None:
        """Gather the towers of a step in which groups hold other entries: a refusal is of all ranks."""
        units = optional_units(self.module)
        if not len(units):
            return
        if not getattr(self.module, "automatic_optimization", True) and torch.is_grad_enabled():
            raise SequenceParallelError(
                "data-parallel groups hold other entries in this batch, images say: with manual optimization it is not known when the gradients "
                "of what reads them are to be added up; give each batch some in the collate function, or use automatic optimization"
            )
        if self.context.mesh.layout.size > 1 and not self.context.unsharded.found_any:
            raise SequenceParallelError(
                "data-parallel groups hold other entries in this batch, images say, and which attention is to other tokens than the text's is "
                "not known: the preflight finds it before the first batch that holds them; leave preflight=True"
            )
        units.gather()

    def _counted(self, step: Step) -> AbstractContextManager[Any]:
        """Run eagerly until attention calls were counted once, in the preflight if it is on: compiled code counts none."""
        if self._attention_reached or step.batch.is_whole or self.context.global_view:
            return nullcontext()
        eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return eager

    def _check_reached(self, step: Step) -> None:
        """Known after the first forward and before the first optimizer step. Equal on all ranks, so no collective is needed."""
        if (
            step.batch.is_whole
            or self.context.global_view
            or (self._attention_reached and not self._counts_later_steps)
        ):
            return
        self.context.last_attention_patterns = tuple(step.attention_patterns)
        self._attention_reached = self.context.attention_told = step.num_attention_calls > 0
        if not self._attention_reached and self.context.mesh.layout.size > 1:
            raise SequenceParallelError(_NOT_OF_THE_SEQUENCE if self.context.unsharded.found_any else _NO_ATTENTION)
