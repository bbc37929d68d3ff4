"""The outcomes of a case, from the best to the worst."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

BEST_FIRST = ("exact", "not compared", "refused", "wrong", "crash")


def worst(answers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer of the worst outcome, which is that of all together."""
    return max(answers, key=lambda each: BEST_FIRST.index(each["outcome"]) if each["outcome"] in BEST_FIRST else -1)
