"""Checks of the user's that stop a step on what a trial shows it: `assert (ids < self.vocab_size).all()`.

They would stop one device there, too: no step goes on with such numbers, and nothing is left that could be compared.
"""

from __future__ import annotations

import traceback

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sp.errors import SequenceParallelError, told_error
from lightning_sp.preflight.recording.users_lines import raises


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
