"""What an evaluation step shows where tokens have other outcomes than the one that all have on its first batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.differences.other_outcomes import (
    UNSEEN,
    common_calls,
    in_words,
    rare_outcomes,
    show_others,
    uniform_calls,
)
from lightning_sp.preflight.evaluation.evaluation_runs import PartRun, WholeRun
from lightning_sp.preflight.evaluation.judgement import NotComparedError, TriedEvaluation, tell_differences
from lightning_sp.preflight.failing_steps import say_not_compared
from lightning_sp.preflight.recording.hidden_terms import Call
from lightning_sp.preflight.recording.token_outcomes import Other
from lightning_sp.step.runner import StepRunner

_Calls = Mapping[Call, Other]


def judge_other_outcomes(
    tried: TriedEvaluation, whole: WholeRun, part: PartRun, run_with: Callable[[_Calls], PartRun], runner: StepRunner
) -> None:
    """Compare once more with other outcomes where all tokens have one, or few may. Every rank must call it.

    Args:
        tried: the step on the first batch.
        whole: what it has shown there.
        part: likewise, of this rank's part.
        run_with: runs it on the same crop with others of some calls, whole and on parts.
        runner: of the model's steps.

    Raises:
        NotComparedError: it shows other numbers then, or another output, and may be tried in the global view. Else a warning says so.
    """
    world = runner.groups.world

    def agree(calls: _Calls) -> bool:
        words, patterns = in_words(calls), runner.context.last_attention_patterns
        try:
            found = run_with(calls)
        except Exception as error:  # on all ranks
            if comm.is_of_communication(error):
                raise
            say_not_compared(f"{tried.name} is not compared {words}", error)
            return False
        finally:
            runner.end_without_backward()
            runner.context.last_attention_patterns = patterns
        try:
            tell_differences(tried, comm.gather_objects(found, world), f"{tried.in_words}, {words},")
        except SequenceParallelError as error:
            told = f"{error}. {UNSEEN}"
            if tried.may_retry:
                raise NotComparedError(told, of_numbers=True) from error
            rank_zero_warn(told)  # what nobody has seen yet is no reason to end a run
        return True

    calls = common_calls(whole.token_outcomes, part.token_outcomes, world)
    show_others(uniform_calls(calls), agree)
    for rare in rare_outcomes(calls, part.read, world):
        agree(rare)
