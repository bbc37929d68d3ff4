"""What a step does later in its run: at other steps, rates and counts, and with other results of steps before it. Compared before the first.

if len(self.losses) > 100: ids = ids.flip(1)      whole and sharded, as at later steps
self.losses.append(float(loss))                   whole runs alone, which show that nothing comes of it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.differences.other_results import (
    compare_with_other_results,
    does_otherwise,
    results_in_words,
    ways_to_show,
)
from lightning_sp.preflight.differences.second_step import behind_a_step
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.recording.checked_indices import CheckedIndices
from lightning_sp.preflight.recording.progress_read import (
    ProgressRead,
    shown_at_remainders,
    shown_later,
    with_other_results,
)
from lightning_sp.preflight.trial import Trial


class Compare(Protocol):
    """Runs a trial whole and sharded, and refuses what differs."""

    def __call__(self, trial: Trial, /, *, says: bool = True) -> bool:
        """Return whether the step runs; where it does not, say so or not."""


def compare_at_later_steps(trial: Trial, whole: Outcome, read: ProgressRead, compare: Compare) -> None:
    """Compare once more what the step does later, if any rank's reads how far the run is, counts, or keeps results. Every rank must call it.

    Args:
        trial: of the step.
        whole: what it gave whole.
        read: what it reads, counts and keeps.
        compare: what compares.

    Communicates: what any rank's step reads, counts and keeps; a whole run for each of some later steps, and more where those do otherwise.
    """
    own = bool(read.progress or read.rates), bool(read.counters), read.has_results
    reads, counts, keeps = map(any, zip(*comm.gather_objects(own, trial.control_group), strict=True))
    if not (reads or counts or keeps):
        return
    if reads or _does_otherwise_later(trial, whole, read, compare, keeps):
        lines = set(read.alike.lines)
        for later in shown_later(trial.module, read, trial.control_group):
            with later() as when, read.alike:
                crop = f"{trial.crop} {when}"
                runs = compare(replace(trial, crop=crop), says=False)
            if not runs:
                with read.alike:
                    compare(_behind(trial, crop, later))
        compare_with_other_results(trial, whole, read, compare)
        if any(comm.gather_objects(reads and lines != read.alike.lines, trial.control_group)):
            # A line that the step comes to later alone.
            _does_otherwise_later(trial, whole, read, compare, keeps=True)
    for later in shown_at_remainders(trial.module, read, trial.control_group) if counts else ():
        _compare_where_otherwise(trial, later, whole, compare)


def _does_otherwise_later(trial: Trial, whole: Outcome, read: ProgressRead, compare: Compare, keeps: bool) -> bool:
    """Return whether a whole run does anything else where all is as later at once; what does is compared so, too."""
    moments = [*shown_later(trial.module, read, trial.control_group)] or [lambda: nullcontext("")]
    found, ways = False, ways_to_show(trial, read) if keeps else [(False, False)]
    for number in range(max(len(moments), len(ways))):
        larger, plain = ways[number % len(ways)]

        @contextmanager
        def shown(number: int = number, larger: bool = larger, plain: bool = plain) -> Iterator[str]:
            with ExitStack() as stack:
                when = stack.enter_context(moments[min(number, len(moments) - 1)]())
                if keeps:
                    stack.enter_context(with_other_results(trial.module, read, larger=larger, plain=plain))
                yield " ".join(filter(None, [when, f"{results_in_words(read, larger=larger)}," if keeps else ""]))

        found |= _compare_where_otherwise(trial, shown, whole, compare)
    return found


def _compare_where_otherwise(
    trial: Trial, shown: Callable[[], AbstractContextManager[str]], whole: Outcome, compare: Compare
) -> bool:
    """Compare the step as it is shown if it does otherwise so; return whether it does. Every rank must call it."""
    with shown() as when:
        again = replace(trial, crop=" ".join(filter(None, [trial.crop, when])))
        is_other, is_finite = _does_otherwise(again, whole)
        runs = not (is_other and is_finite) or compare(again, says=False)
    if not runs:
        compare(_behind(trial, again.crop, shown))
    return is_other


def _behind(trial: Trial, crop: str, shown: Callable[[], AbstractContextManager[str]]) -> Trial:
    """Return the trial of a step that fails as it is shown by itself, behind another one: it may want what that leaves."""
    return behind_a_step(trial, f"{crop.rstrip(',')} behind another step", shown)


def _does_otherwise(again: Trial, whole: Outcome) -> tuple[bool, bool]:
    """Return whether any rank's whole run gives something else, goes other ways, or fails, and whether its loss is finite.

    Every rank must call it.
    """
    try:
        with torch.compiler.set_stance("force_eager"), CheckedIndices():
            then = again.whole()
    except SequenceParallelError:
        return True, True
    is_finite = then.loss is None or bool(torch.isfinite(then.loss).all())
    own = not is_finite or does_otherwise(then, whole), is_finite
    others, finite = zip(*comm.gather_objects(own, again.control_group), strict=True)
    return any(others), all(finite)
