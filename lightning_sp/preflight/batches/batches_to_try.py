"""Which batches of a fit are tried: the first with targets, the first padded one, longer ones, those of later steps and of new operations."""

from __future__ import annotations

import sys
from typing import Any

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.preflight.batches.earlier_step import EarlierStep

# Optimizer steps before which a batch is tried once more: a term may join the loss, a weight leave zero, a rank's state drift.
AGAIN = (3, 10, 100, 1_000, 10_000)
# The first batches that are longer than all before are each tried; then those that are longer by a quarter.
_LONGER = 4
# Batches that are cut at other places are tried so often, where no trial shows that this is of no matter.
_MOST_CUTS = 8


class BatchesToTry:
    """Keeps the batches of a fit that are to be tried, as their loader gave them, until their step begins; a class because it waits for that."""

    def __init__(self) -> None:
        self._first = self._expected = self._not_compared = self._tried_padding = False
        self.trained_untried = False  # micro-batches of which none was compared before
        self._first_step = 0
        self._again: list[int] = []
        self._batch: Any = None
        self.last: Any = None  # of the step in progress, while a fit has a preflight
        self._of_new: Any = None  # whose step did what none before did
        self._new_at: EarlierStep | None = None  # when it did, as `expect_comparison` was told
        self.seen_tokens: int | None = None  # of the longest whole batch whose step was run by shapes
        self._longest, self._records = sys.maxsize, 0
        self._cuts: set[tuple[int, ...]] = set()  # where batches were cut that were tried
        self._cuts_matter = self.cut_is_untried = False

    def expect(self, due: bool, step: int = 0) -> None:
        """Begin a fit at an optimizer step, with a preflight or without."""
        self._first = self._expected = due
        self._tried_padding = self._not_compared = self.trained_untried = False
        self.last = self._of_new = self._new_at = None
        self._first_step = 0
        self._batch = None
        self._again = [each for each in AGAIN if each > step] if due else []
        self.seen_tokens, self._longest, self._records = None, sys.maxsize, 0
        self._cuts, self._cuts_matter, self.cut_is_untried = set(), due, False

    def is_new(self, info: SequenceInfo) -> bool:
        """Return whether the step may do other things on a batch than on those before: it is longer, or cut at other places."""
        return info.longest > self.known_length or self.is_cut_elsewhere(info)

    def is_cut_elsewhere(self, info: SequenceInfo) -> bool:
        """Return whether a batch is cut where none was that was tried, and groups of neighbouring tokens may be cut so."""
        return self._cuts_matter and bool(self._cuts) and info.cut not in self._cuts

    def note_cut(self, info: SequenceInfo, *, alike: bool) -> None:
        """Note a batch that was tried, by where it is cut.

        Args:
            info: of the batch.
            alike: whether trials have shown that this is of no matter.
        """
        self._cuts.add(info.cut)
        self._cuts_matter &= not alike and len(self._cuts) < _MOST_CUTS
        self.cut_is_untried = False

    @property
    def known_length(self) -> int:
        """Tokens above which a training batch is to be tried; of a rank's own batches."""
        return self._longest if self._records < _LONGER else self._longest + self._longest // 4

    def note_length(self, tokens: int, seen_tokens: int | None) -> None:
        """Note a batch that was tried, by its longest sequence.

        Args:
            tokens: of that.
            seen_tokens: as `TriedBatch` has it; None: a step's lengths are of no matter.
        """
        self.seen_tokens = seen_tokens
        known = 0 if self._longest == sys.maxsize else self._longest
        self._longest = sys.maxsize if seen_tokens is None else max(known, tokens)

    def expect_again(self, step: int) -> None:
        """Try the batch of an optimizer step, or the next one behind it, as the first, if this fit has a preflight and has tried its first."""
        if self._expected and not self._first:
            self._first, self._first_step = True, step

    def expect_next(self, step: int, after: int, *, within: bool) -> None:
        """Try the batch of an optimizer step in place of one that had no targets.

        Args:
            step: of the batch.
            after: what `take` gave with the other one.
            within: whether other micro-batches are trained on before it.
        """
        self.trained_untried |= within and not after
        if after:
            self._again = sorted({*self._again, step})
        else:
            self.expect_again(step)

    def expect_comparison(self, step: int, when: EarlierStep) -> None:
        """Try the batch of the step in progress before an optimizer step, if this fit has a preflight and has tried its first.

        Args:
            step: before which.
            when: the moment of the step in progress, in which its batch is tried.
        """
        if self._expected and not self._first:
            self._again, self._not_compared = sorted({*self._again, step}), True
            self._of_new, self._new_at = self.last, when

    def expect_changed(self, step: int, tokens: int, batch: Any) -> None:
        """Try a batch from an optimizer step on, for its step may do other things, if this fit has tried its first.

        Args:
            step: in which it can be tried.
            tokens: of its longest sequence.
            batch: as its loader gave it.
        """
        if self._expected and not self._first:
            self._again = sorted({*self._again, step})
            if tokens > self.known_length:
                self._longest, self._records, self._of_new, self._new_at = tokens, self._records + 1, batch, None

    @property
    def lacks_comparison(self) -> bool:
        """Whether a trial that `expect_comparison` asked for has not come: the fit has ended."""
        return self._not_compared

    def is_due(self, *, training: bool) -> bool:
        """Return whether a batch is the first to be tried."""
        return self._first and training

    @property
    def is_offered(self) -> bool:
        """Whether the batch whose step comes next is to be tried."""
        return self._batch is not None

    def offer(self, batch: Any, *, training: bool, step: int, padded: bool = False) -> None:
        """Remember a training batch if a preflight is due: the first micro-batch of its optimizer step.

        Args:
            batch: as the loader gave it.
            training: whether it is one of training.
            step: optimizer steps so far.
            padded: whether it is the whole of a step that is padded: the first of these is tried.
        """
        self.last = batch if training and self._expected else None
        first = self._first and step >= self._first_step
        anew = padded and self._expected and not self._tried_padding and not self._first
        if training and (first or anew or (self._again and step >= self._again[0])):
            self._batch = batch
            self._tried_padding = self._tried_padding or padded

    def tried(self, offered: Any) -> tuple[Any, EarlierStep | None]:
        """Return the batch that is to be tried where one is offered: that one, or an earlier one once, of which that was asked, with when."""
        kept, self._of_new = self._of_new, None
        when, self._new_at = self._new_at, None
        return (offered, None) if kept is None else (kept, when)

    def take(self, step: int) -> tuple[Any, int]:
        """Return the batch once, None where no preflight is due, and the optimizer steps before it, 0 for the first."""
        batch, self._batch = self._batch, None
        first = self._first and step >= self._first_step
        after = 0 if first else step
        if batch is not None:
            self._first = self._first and not first
            self._again, self._not_compared = [each for each in self._again if each > step], False
        return batch, after
