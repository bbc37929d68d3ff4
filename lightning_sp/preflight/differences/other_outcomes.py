"""What a step does where tokens have other outcomes than the one that all have on a crop: a gate that opens, an expert that is full.

Compared whole and on a part, with other outcomes shown in both (`preflight/recording/uniform_outcomes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.differences.hidden_branches import first_names
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.recording.hidden_terms import Call
from lightning_sp.preflight.recording.uniform_outcomes import Other
from lightning_sp.preflight.trial import Trial

# Calls that are tried each by itself, where the step does not run with others shown in all.
_SINGLE = 3


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
    own = {call: other for call, other in whole.uniform.items() if call in sharded.uniform}
    first, *others = comm.gather_objects(own, trial.control_group)
    calls = {call: other for call, other in first.items() if all(call in each for each in others)}
    if not calls or _agree(trial, calls, runs) or len(calls) == 1:
        return
    for call, other in islice(calls.items(), _SINGLE):
        _agree(trial, {call: other}, runs)


def _agree(trial: Trial, calls: Mapping[Call, Other], runs: Callable[[Trial], bool]) -> bool:
    """Return whether the step runs with other outcomes of some calls."""
    named = first_names([call.describe() for call in calls])
    try:
        return runs(replace(trial, crop=f"{trial.crop}, with other outcomes for some tokens at {named},", turned=calls))
    except SequenceParallelError as error:
        told = (
            f"{error}. All tokens have one outcome there now, so that nothing of it is seen; later ones may have others: use "
            "global_view=True, in which the step sees whole sequences"
        )
        if trial.may_retry:
            raise SequenceParallelError(told) from error
        rank_zero_warn(told)
        return True
