"""Steps that fail in a trial as they would on one device.

A check of the user's stops one on what it is shown, `assert (ids < self.vocab_size).all()`: no step goes on with such numbers, and nothing is
left that could be compared. Another one is told with what to look at.
"""

from __future__ import annotations

import traceback

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sp.errors import SequenceParallelError, told_error
from lightning_sp.preflight.recording.users_lines import raises

_OF_LENGTH = "where the model needs a fixed length, set preflight_tokens to it; preflight=False leaves the check out"
_OF_INDEX = (
    "an id of the batch may be beyond the embedding's rows, or a target beyond the head's: compare the largest ones with the model's vocabulary "
    "and longest position; targets that count rows by self.global_rank are to count self.trainer.strategy.data_parallel_rank: ranks share rows"
)
_OF_STEPS = (
    "a trial runs one step by itself, a later one, too: what a step leaves for the next is to have a first value, in __init__ say; "
    "preflight=False leaves the check out"
)


def what_to_look_at(error: BaseException) -> str:
    """Return what may be behind an error of a step's, in words."""
    if isinstance(error, IndexError):
        return _OF_INDEX
    return _OF_STEPS if isinstance(error, (AttributeError, KeyError)) else _OF_LENGTH


def is_check(error: BaseException) -> bool:
    """Return whether an error was raised by a line of Python that compares, or ends the process: not by torch, NumPy or here."""
    while error.__cause__ is not None and isinstance(error, SequenceParallelError):
        error = error.__cause__
    if isinstance(error, SystemExit):
        return True
    if isinstance(error, SequenceParallelError) or error.__traceback__ is None:
        return False
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    name = frame.f_globals.get("__name__", "").partition(".")[0]
    return name not in ("torch", "numpy", "lightning_sp") and raises(frame.f_code.co_filename, line)


def say_not_compared(what: str, error: BaseException) -> None:
    """Say that a step fails on what it is shown, so that nothing is known of it there; not where a check of the user's ends one device's run.

    Args:
        what: is not compared, in words.
        error: that it fails with; that of a part alone `ends_steps`.
    """
    if _is_of_part(error) or not is_check(error):
        told = error if isinstance(error, SequenceParallelError) else told_error(error)
        rank_zero_info(f"preflight: {what}: {told}")


def _is_of_part(error: BaseException | None) -> bool:
    return error is not None and (getattr(error, "ends_steps", False) or _is_of_part(error.__cause__))
