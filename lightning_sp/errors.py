"""The one public error family: what was given, the rule, the fix, with the numbers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SequenceParallelError(ValueError):
    """Base of every refusal of lightning_sp.

    The message holds what was given, the rule it breaks and what to do instead. All ranks raise it together:
    either the check read inputs that are equal everywhere, or the ranks agreed on it first (`comm.agree`).
    """


def closest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""
