"""Arrays of NumPy's whose numbers count a layer's tokens: each is what it is, but for comparisons, as a tracked number's.

counts = kinds.bincount().numpy();  if counts.max() > 40: ...        and so does what NumPy computes of it
x[start : start + counts[0]]                                         how many tokens an expert has is what it is
if (counts == counts.max())[0]: ...                                  which of them is the largest, too
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_sp.preflight.recording.numbers_read.tracked_numbers import Budget, tracked

_COMPARISONS = {
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "equal": "eq", "not_equal": "ne",
}  # fmt: skip
# As a number sees it that stands behind: 40 < counts.
_MIRRORED = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge"}


class TrackedArray(np.ndarray[Any, Any]):
    """An array that knows what it counts; a single number of it is one of no dimensions.

    Attributes:
        budget: how its comparisons come out; None for what is made of it by its shape alone.
    """

    budget: Budget | None = None

    def __array_finalize__(self, made_of: Any) -> None:
        """Take over the budget of what it is a view or a copy of."""
        self.budget = getattr(made_of, "budget", None)

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, **kwargs: Any) -> Any:
        """Compute with the numbers as they are; what comes of it is tracked, and a comparison is forced."""
        name = _COMPARISONS.get(ufunc.__name__)
        budget = next(each.budget for each in (*inputs, *kwargs.get("out", ())) if isinstance(each, TrackedArray))
        if "out" in kwargs:
            kwargs["out"] = tuple(_plain(each) for each in kwargs["out"])
        own = getattr(ufunc, method)(*(_plain(each) for each in inputs), **kwargs)
        if budget is None:
            return own
        if name is None or method != "__call__":
            return tracked_array(own, budget)
        counted = [isinstance(each, TrackedArray) for each in inputs]
        if all(counted) and name in ("eq", "ne"):
            return own
        if not counted[0]:
            name = _MIRRORED.get(name, name)
        other = _plain(inputs[1 if counted[0] else 0])
        decided = budget.decided(name, other.item() if np.size(other) == 1 and hasattr(other, "item") else other, None)
        return own if decided is None else (np.full_like(own, decided) if np.ndim(own) else np.bool_(decided))

    def __getitem__(self, index: Any) -> Any:
        """Return some of the numbers, or one, as what they are."""
        found = super().__getitem__(index)
        return found if self.budget is None else tracked_array(found, self.budget)

    def __bool__(self) -> bool:
        """Return whether there is any of a single one."""
        own = bool(_plain(self))
        return own if self.budget is None else bool(self.budget.decided("ne", 0, own))

    def __hash__(self) -> int:  # type: ignore[override]
        """Return a single one's, as NumPy's numbers have it and no array has."""
        return hash(_plain(self).item())

    def item(self, *index: Any) -> Any:
        """Return a number of Python's, tracked."""
        own = _plain(self).item(*index)
        return own if self.budget is None else tracked(own, self.budget)

    def tolist(self) -> Any:
        """Return numbers of Python's, tracked."""
        own = _plain(self).tolist()
        return own if self.budget is None else tracked(own, self.budget)


def tracked_array(value: Any, budget: Budget) -> Any:
    """Return numbers of NumPy's as ones that know what they are; what is neither a number nor an array of numbers as it is."""
    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in "iuf":
        return value
    found = np.asarray(value).view(TrackedArray)
    found.budget = budget
    return found


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, TrackedArray) else value
