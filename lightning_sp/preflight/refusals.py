"""A refusal of a step that was tried: with its causes, with more lines, its first sentence alone, and whether it comes of another rank's."""

from __future__ import annotations

from collections.abc import Callable

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.loss.check import LossDiffersError
from lightning_sp.preflight.evaluation.judgement import NotComparedError
from lightning_sp.preflight.explain.verdict import ResultDiffersError
from lightning_sp.preflight.training_numbers import NumbersDifferError


def explained(refusal: SequenceParallelError, run: Callable[[], object]) -> SequenceParallelError:
    """Return a refusal with its causes. They are looked for once no other view is left to be tried, for that takes as long as some steps.

    Args:
        refusal: of a trial that has looked for none.
        run: that trial, which does now. Every rank must call it.
    """
    if isinstance(refusal, (ResultDiffersError, LossDiffersError)):
        try:
            run()
        except SequenceParallelError as found:
            return found
    return refusal


def with_lines(error: SequenceParallelError, *lines: str) -> SequenceParallelError:
    """Return a refusal of the kind of another, with more lines."""
    text = "\n".join(lines)
    if isinstance(error, NotComparedError):
        return NotComparedError(text, of_part=error.of_part, of_numbers=error.of_numbers, undecided=error.undecided)
    return NumbersDifferError(text) if isinstance(error, NumbersDifferError) else SequenceParallelError(text)


def is_of_numbers(error: SequenceParallelError) -> bool:
    """Return whether a step is refused for numbers that it shows: without another view a warning says so, and it runs on."""
    return bool(getattr(error, "of_numbers", False))


def is_of_communication(error: BaseException) -> bool:
    """Return whether a refusal comes of a message that another rank had left."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return any(map(comm.is_of_communication, chain))


def first_sentence(words: str) -> str:
    """Return what a refusal says before its advice."""
    return words.splitlines()[0].partition("; ")[0]
