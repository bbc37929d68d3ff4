"""What a step does where tokens have other outcomes than the one that all have on a crop: a gate that opens, an expert that is full.

Compared whole and on a part, with other outcomes shown in both (`preflight/recording/token_outcomes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.differences.hidden_branches import first_names
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.recording.hidden_terms import Call
from lightning_sp.preflight.recording.numbers_read.lines_of_parts import Line, numbers_of_parts
from lightning_sp.preflight.recording.token_outcomes import TRUTHS, Other, Truths
from lightning_sp.preflight.trial import Trial

# Calls that are tried each by itself: truths, and where the step does not run with others shown in all.
_SINGLE = 3
UNSEEN = (
    "All tokens have one outcome there now, or each part has tokens of each, so that nothing of it is seen; later ones may have others: use "
    "global_view=True, in which the step sees whole sequences"
)


def compare_with_other_outcomes(trial: Trial, whole: Outcome, sharded: Outcome, runs: Callable[[Trial], bool]) -> None:
    """Compare once more with other outcomes where all tokens have one. Every rank must call it.

    Args:
        trial: of the step.
        whole: what it gave whole.
        sharded: what it gave on a part.
        runs: compares a trial, if the step runs on it, and returns whether it does.

    Raises:
        SequenceParallelError: they differ, and the step may be tried in the global view. Else a warning says so.
    """
    if trial.context.global_view or not trial.context.mesh.splits_samples:
        return

    def agree(calls: Mapping[Call, Other]) -> bool:
        # What is counted may be beyond a table, say, where many tokens have another outcome.
        return _agree(trial, calls, runs) or _agree(replace(trial, turned_once=True), calls, runs)

    group = trial.control_group
    calls = common_calls(whole.token_outcomes, sharded.token_outcomes, group)
    show_others(uniform_calls(calls), agree)
    read = numbers_of_parts(whole.read, sharded.read, trial.context.mesh.data_parallel_size)
    for rare in rare_outcomes(calls, read, group):
        _agree(trial, rare, runs)


def common_calls(
    whole: Mapping[Call, Other], part: Mapping[Call, Other], group: ProcessGroup | None
) -> dict[Call, Other]:
    """Return the calls that are noted of a whole crop, and are found in the parts of all ranks.

    Args:
        whole: such calls.
        part: all calls that give outcomes of tokens of this rank's part.
        group: the world, on a backend for host objects.
    """
    own = {call: other for call, other in whole.items() if call in part}
    first, *others = comm.gather_objects(own, group)
    return {call: other for call, other in first.items() if all(call in each for each in others)}


def uniform_calls(calls: Mapping[Call, Other]) -> dict[Call, Other]:
    """Return the calls that give all tokens one outcome."""
    return {call: other for call, other in calls.items() if not isinstance(other, (tuple, Truths))}


def turned_alone(calls: Mapping[Call, Other]) -> dict[Call, Other]:
    """Return calls with truths that are turned at tokens, and not by another number that they are compared with."""
    return {call: None if call.function in TRUTHS else other for call, other in calls.items()}


def rare_outcomes(
    calls: Mapping[Call, Other], read: Collection[Line], group: ProcessGroup | None
) -> list[dict[Call, Other]]:
    """Return choices of which one is to be rare, and truths of which either is; none where no rank asks what its tokens have.

    Args:
        calls: alike on all ranks.
        read: lines that compare or read numbers of this rank's part: `if mask.any():`, `len(chosen.unique())`.
        group: the world, on a backend for host objects.
    """
    asked = {line for each in comm.gather_objects([*read], group) for line in each}
    choices = {call: other for call, other in calls.items() if isinstance(other, tuple)}
    truths = {call: other for call, other in calls.items() if isinstance(other, Truths)}
    nearest = sorted(truths, key=partial(_distance, asked))[: _SINGLE if asked else 0]
    rare: list[dict[Call, Other]] = [{**choices}] if choices and asked else []
    return rare + [{call: replace(truths[call], rare=value)} for call in nearest for value in (True, False)]


def _distance(asked: Collection[Line], call: Call) -> float:
    """Return how many lines a call is from those that ask."""
    return min((abs(call.line - each.line) for each in asked if each.file == call.file), default=math.inf)


def show_others(calls: Mapping[Call, Other], agree: Callable[[Mapping[Call, Other]], bool]) -> None:
    """Compare with other outcomes of all calls, or where the step does not run on those, of some by themselves. Every rank must call it.

    Args:
        calls: alike on all ranks.
        agree: compares a step with others of some calls, and returns whether it runs so.
    """
    if not calls or agree(calls) or len(calls) == 1:
        return
    for call, other in islice(calls.items(), _SINGLE):
        agree({call: other})


def in_words(calls: Mapping[Call, Other]) -> str:
    """Return what of a step is shown."""
    return f"with other outcomes for some tokens at {first_names([call.describe() for call in calls])}"


def _agree(trial: Trial, calls: Mapping[Call, Other], runs: Callable[[Trial], bool]) -> bool:
    """Return whether the step runs with other outcomes of some calls."""
    try:
        return runs(replace(trial, crop=f"{trial.crop}, {in_words(calls)},", turned=calls))
    except SequenceParallelError as error:
        told = f"{error}. {UNSEEN}"
        if trial.may_retry:
            raise SequenceParallelError(told) from error
        rank_zero_warn(told)
        return True
