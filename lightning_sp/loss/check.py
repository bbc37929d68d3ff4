"""Refusing a training loss that is no mean over tokens: what is computed from a shard alone differs between ranks.

The first loss is checked before its backward, to the bit. Every later one is compared while training goes on, and the answer is read when the
next step begins, so that no step waits for the host. A term that joins the loss later is therefore found one step after its first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context.step import Step
from lightning_sp.errors import SequenceParallelError

# In units of the loss' own precision: what two devices may make of the same numbers.
_ROUNDINGS = 8


class _Comparison(NamedTuple):
    """A loss that is being compared between ranks."""

    spread: comm.Spread
    value: Tensor
    num_losses: int


class LossCheck:
    """The check of one run's losses. A comparison is in flight from one step to the next."""

    def __init__(self) -> None:
        self._first = True
        self._pending: _Comparison | None = None

    def check(self, step: Step, output: Any, group: ProcessGroup | None) -> None:
        """Check the loss of a step. Every rank must call it.

        Args:
            step: the step that computed it.
            output: what training_step returned, with the loss as a mean.
            group: the world, on a backend for host tensors.

        Communicates: one all_reduce of 16 bytes, of 8 more for the first loss.

        Raises:
            SequenceParallelError: the ranks' losses differ, or the loss weighs tokens in a way that is unknown, or that is not one device's.
        """
        self.finish(group)
        loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        value = loss.detach().double().reshape(())
        if not self._first:
            eps = torch.finfo(loss.dtype).eps
            self._pending = _Comparison(comm.Spread(torch.nan_to_num(value), _ROUNDINGS * eps), value, step.num_losses)
            return
        self._first = False
        if not comm.all_equal(value.view(torch.int64).cpu(), group):
            raise _differs(value, step.num_losses, group)
        if step.num_losses == 0 and not step.token_counts and torch.is_grad_enabled():
            raise SequenceParallelError(
                "training_step computed its loss without F.cross_entropy and returned no num_tokens: how it weighs tokens is not known; use "
                "F.cross_entropy, lightning_sp.sharded_cross_entropy, or return {'loss': sum over tokens, 'num_tokens': count}"
            )
        if refusals := [each for each in comm.gather_objects(_row_means(step), group) if each]:
            raise SequenceParallelError(refusals[0])

    def finish(self, group: ProcessGroup | None) -> None:
        """Read the answer about the previous loss, at the end of training too. Every rank must call it.

        Raises:
            SequenceParallelError: the ranks' losses differed.
        """
        if self._pending is None:
            return
        compared, self._pending = self._pending, None
        if compared.spread.is_too_wide():
            raise _differs(compared.value, compared.num_losses, group)


def _row_means(step: Step) -> str | None:
    """Return what is wrong with a mean of means over rows: rows of equal number in different data-parallel groups would become one."""
    rows = step.batch.rows
    if rows == 1 or not step.num_row_means == step.num_losses == rows:
        return None
    return (
        f"training_step called F.cross_entropy {rows} times, once for each of its {rows} rows: a mean of means. Each is a mean over "
        "the tokens of all ranks, so row i of different data-parallel groups would be averaged as one sample; use one F.cross_entropy over all "
        "rows, return {'loss': sum over tokens, 'num_tokens': count}, or data_parallel_size=1"
    )


def _differs(value: Tensor, num_losses: int, group: ProcessGroup | None) -> SequenceParallelError:
    values = [float(v) for v in comm.gather_objects(float(value), group)]
    return SequenceParallelError(
        f"training_step's loss differs between ranks: {values}; a part of it was computed from this rank's tokens alone (an auxiliary "
        f"term, an MSE, a pooled head; {num_losses} cross entropies were called), so it is no mean over the sequence's tokens; use "
        "F.cross_entropy, lightning_sp.sharded_cross_entropy, or return {'loss': sum over tokens, 'num_tokens': count}"
    )
