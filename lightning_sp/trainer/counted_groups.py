"""How data-parallel groups count in the losses of a fit's steps, and what a trial has not told of it."""

from __future__ import annotations

from contextlib import ExitStack

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.loss.counted_terms import counted_terms, counts_differ, counts_of_groups

_REMEDY = "lightning_sp.reductions.batch_mean(x, mask) is one device's"


class CountedGroups:
    """Counts groups by what each divides its loss by, where a trial has told so; a class because what is found is read a step later.

    Args:
        context: what trials have told.
    """

    def __init__(self, context: SequenceContext) -> None:
        self._context = context
        self._backward = ExitStack()
        self._found: tuple[Tensor, bool] | None = None
        self._is_told = False

    def follow(self, loss: Tensor, step: Step, *, is_normalized: bool) -> bool:
        """Prepare the backward of a loss, until `release`; return whether its terms count by themselves. Every rank must call it.

        Args:
            loss: of this rank's group.
            step: that has made it.
            is_normalized: Lightning has divided it by accumulate_grad_batches.

        Communicates: 264 bytes over the data-parallel groups, where they count so, or where no trial has told.
        """
        self.release()
        self.finish()
        context = self._context
        if context.by_counts:
            filler = step.batch.is_filler
            counting = counted_terms(loss, context, is_filler=filler, is_normalized=is_normalized)
            counts = self._backward.enter_context(counting)
            self._found = None if counts is None else (counts, True)
            return True
        is_open = context.by_counts is None and context.has_own_terms and not context.adds_up_rows
        if is_open and not self._is_told and not step.batch.counts_apart(trains=True):
            self._found = counts_of_groups(loss, context), False
        return False

    def release(self) -> None:
        """End a backward."""
        self._backward.close()

    def finish(self) -> None:
        """Warn of the last step where its groups could not count so, or have counts of their own of which no trial has told."""
        if self._found is None or self._is_told:
            return
        (counts, by_counts), self._found = self._found, None
        if by_counts and bool((counts[:, 0] != counts[0, 0]).any() | (counts[0, 0] < 0)):
            self._warn(
                f"the losses of data-parallel groups have {_listed(counts[:, 0])} terms of their own rows in a step (-1: not known, in compiled "
                "code or a checkpoint), and trials told that each counts by what it is divided by: such a step is averaged over the groups"
            )
        elif not by_counts and counts_differ(counts):
            which = int((counts != counts[:1]).any(0).nonzero()[0])
            self._warn(
                "data-parallel groups divide a term of the loss by other numbers, "
                f"{_listed(counts[:, which])} in a step, and no trial has shown how that counts: the groups are averaged"
            )

    def _warn(self, found: str) -> None:
        self._is_told = True
        rank_zero_warn(f"{found}, which may not be what one device computes on all rows. {_REMEDY}")


def _listed(numbers: Tensor) -> str:
    return ", ".join(f"{each:g}" for each in numbers.tolist())
