"""The one public error family: what was given, the rule, the fix, with the numbers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping


class SequenceParallelError(ValueError):
    """Base of every refusal of lightning_sp.

    The message holds what was given, the rule it breaks and what to do instead. All ranks raise it together:
    either the check read inputs that are equal everywhere, or the ranks agreed on it first (`comm.agree`).
    """


def text_of(error: BaseException) -> str:
    """Return an error's text, also where its own `__str__` fails or gives what no other process can read.

    One rank's error is told to the others as text: without it they would wait.
    """
    try:
        text = str(error)
    except Exception as failed:
        return f"(its __str__ has raised {type(failed).__name__})"
    return text.encode("utf-8", "backslashreplace").decode()


def told_error(error: BaseException) -> str:
    """Return an error's class and text, as the last line of a traceback has them."""
    return f"{type(error).__name__}: {text_of(error)}"


def closest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def check_whole_numbers(given: Mapping[str, object], *, least: int = 1) -> None:
    """Refuse options that are no whole numbers, or too small.

    Raises:
        SequenceParallelError: with the first one's name and value.
    """
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SequenceParallelError(f"{name}={value!r}: must be a whole number of at least {least}")


def check_numbers(given: Mapping[str, object], *, least: float = 0.0) -> None:
    """Refuse options that are no finite numbers, or too small.

    Raises:
        SequenceParallelError: with the first one's name and value.
    """
    for name, value in given.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= float(value) < math.inf:  # type: ignore[arg-type]
            raise SequenceParallelError(f"{name}={value!r}: must be a number of at least {least:g}")
