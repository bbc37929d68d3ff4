"""What a step does later in its run: at other steps, rates and counts, and with other results of steps before it. Compared before the first.

if len(self.losses) > 100: ids = ids.flip(1)      whole and sharded, as at later steps
self.losses.append(float(loss))                   whole runs alone, which show that nothing comes of it
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
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
            if not runs:  # it may want what a step before leaves
                with read.alike:
                    compare(behind_a_step(trial, f"{crop} behind another step", later))
        compare_with_other_results(trial, whole, read, compare)
        if any(comm.gather_objects(reads and lines != read.alike.lines, trial.control_group)):
            # A line that the step comes to later alone.
            _does_otherwise_later(trial, whole, read, compare, keeps=True)
    for later in shown_at_remainders(trial.module, read, trial.control_group) if counts else ():
        with later() as when:
            _compare_where_otherwise(replace(trial, crop=f"{trial.crop} {when}"), whole, compare)


def _does_otherwise_later(trial: Trial, whole: Outcome, read: ProgressRead, compare: Compare, keeps: bool) -> bool:
    """Return whether a whole run does anything else where all is as later at once; what does is compared so, too."""
    moments = [*shown_later(trial.module, read, trial.control_group)] or [lambda: nullcontext("")]
    found, ways = False, ways_to_show(trial, read) if keeps else [(False, False)]
    for number in range(max(len(moments), len(ways))):
        with ExitStack() as stack:
            larger, plain = ways[number % len(ways)]
            when = stack.enter_context(moments[min(number, len(moments) - 1)]())
            if keeps:
                stack.enter_context(with_other_results(trial.module, read, larger=larger, plain=plain))
            shown = [when, f"{results_in_words(read, larger=larger)}," if keeps else ""]
            again = replace(trial, crop=" ".join(filter(None, [trial.crop, *shown])))
            # Where it fails so, it is compared at each moment, and with other results, by itself.
            found |= _compare_where_otherwise(again, whole, partial(compare, says=False))
    return found


def _compare_where_otherwise(again: Trial, whole: Outcome, compare: Callable[[Trial], bool]) -> bool:
    is_other, is_finite = _does_otherwise(again, whole)
    if is_other and is_finite:
        compare(again)
    return is_other


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
