"""Numbers of Python's that know what they are: each is what it is, but for comparisons, which come out as if it were small, or large.

    count = mask.sum().item();  if count > 20: ...                 and so does what Python computes of it
    if math.exp(loss.item()) < 20: ...                             or `math`, or NumPy: `shown_functions.py`
    if np.mean(self.losses[-10:]) < 2: ...                         of a list of them a plain number is made, of others than they are

What C takes of them is what they are: a text, a tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from lightning_sp.users_code.ownership import is_called_by_user

# Of a number that Python takes as its own: of tokens, say.
TIMES = 4
# Comparisons of results in a run.
_MOST = 10_000
_FAR = 1e3
# Of a count that Python gets as a plain one.
_LEAST_BITS = 10
_ABOVE = {"gt", "ge", "ne"}


class Budget:
    """How many comparisons are still forced: a loop that waits for one ends; a class because it counts.

    Args:
        left: so many.
        larger: as if a number were large; else small.
        counts: whether numbers count something: whether anything is there is not forced to no, and none is made very large.
        plain: numbers themselves are large, or small, and no comparison comes out otherwise.

    Attributes:
        has_keys: whether a line of the user's has looked something up by such a number: in a dict, in a set.
    """

    def __init__(self, left: int, *, larger: bool, counts: bool = True, plain: bool = False) -> None:
        self.left, self.larger, self.counts, self.plain = left, larger, counts, plain
        self._first, self.has_keys = left, False

    def refill(self) -> None:
        """Begin anew: as many are forced as at first."""
        self.left = self._first

    def decided(self, name: str, other: Any, own: Any) -> Any:
        """Return how a comparison comes out, by its name and what a number is compared with."""
        if self.left <= 0 or (self.counts and not self.larger and _asks_for_any(name, other)):
            return own
        self.left -= 1
        return (name in _ABOVE) == self.larger


def _asks_for_any(name: str, other: Any) -> bool:
    """Return whether a comparison asks whether there is anything."""
    number = (
        float(other) if isinstance(other, (int, float)) or (isinstance(other, Tensor) and other.numel() == 1) else None
    )
    if other is None:
        return True
    return number == 0 or (number == 1 and name in ("ge", "lt"))


def far_from(number: Any, *, larger: bool) -> Any:
    """Return a number that is larger, or smaller, than those of whole batches are likely to be."""
    return number + (1 if larger else -1) * TIMES * (abs(number) + 1)


def far_from_float(number: Any, *, larger: bool) -> Any:
    """Return a number with a fraction, a loss or an activation, beyond what thresholds are likely to be, of the same sign; or an array."""
    far = np.maximum(abs(number), 1 / _FAR) * _FAR if larger else np.minimum(number * _FAR, number / _FAR)
    return np.asarray(far, number.dtype) if isinstance(number, np.ndarray) else float(far)


def beyond(number: Any) -> Any:
    """Return a plain number that is larger than counts of a batch are likely to be, with all bits set; of a list or array each."""
    if isinstance(number, list):
        return [beyond(each) for each in number]
    if isinstance(number, bool):
        return number
    if isinstance(number, np.ndarray):
        far = np.maximum(far_from(number.astype(np.float64), larger=True), 2**_LEAST_BITS - 1)
        return np.minimum(far, np.iinfo(number.dtype).max).astype(number.dtype)
    if isinstance(number, float):
        return float(beyond(int(number))) if number.is_integer() else far_from_float(number, larger=True)
    bits = max(_LEAST_BITS, far_from(abs(number), larger=True).bit_length())
    return (1 if number >= 0 else -1) * (2**bits - 1)


def made(kind: Any, value: Any, budget: Budget) -> Any:
    """Return a number of a kind: `Integer`, `Float` or `Size`."""
    number = kind(value)
    number.budget = budget
    return number


def of_results(*, larger: bool, plain: bool = False) -> Budget:
    """Return what results of a run, losses say, come out by in comparisons, or are where that is plain: large, or small."""
    return Budget(_MOST, larger=larger, counts=False, plain=plain)


def tracked_number(value: float, budget: Budget) -> float:
    """Return a result that is what it is, but for comparisons."""
    found: float = made(Float, value, budget)
    return found


def tracked(value: Any, budget: Budget) -> Any:
    """Return a number, or those of a list, as one that knows what it is; anything else as it is."""
    if isinstance(value, list):
        return [tracked(each, budget) for each in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return made(Integer if isinstance(value, int) else Float, value, budget)
    return value


def _compared(name: str) -> Any:
    def compare(self: Any, other: Any) -> Any:
        own = getattr(self.plain, f"__{name}__")(self, other)
        return own if own is NotImplemented else self.budget.decided(name, other, own)

    return compare


def _computed(name: str) -> Any:
    def compute(self: Any, *others: Any) -> Any:
        value = getattr(self.plain, f"__{name}__")(self, *others)
        return value if value is NotImplemented else tracked(value, self.budget)

    return compute


def _rounded(name: str) -> Any:
    def rounds(self: Any, *others: Any) -> Any:
        own = self.plain.__add__(self, 0)  # a plain one: `int(self)` would come here
        if not self.budget.counts:
            number = far_from_float(float(own), larger=self.budget.larger)
        else:
            number = self.plain(far_from(own, larger=True)) if self.budget.larger else own
        value = getattr(self.plain, f"__{name}__")(number, *others)
        # Python wants a plain one of `int(self)`.
        return value if name in ("int", "trunc") else tracked(value, self.budget)

    return rounds


def _hash(self: Any) -> int:
    self.budget.has_keys |= is_called_by_user()
    return int(self.plain.__hash__(self))


def _ratio(self: Any) -> tuple[int, int]:
    """Return what `statistics` takes a number by."""
    ratio: tuple[int, int] = farther(self).as_integer_ratio()
    return ratio


def farther(number: Any) -> Any:
    """Return a plain number that is larger than one of these, or smaller; of any other that number itself."""
    if not isinstance(number, (Integer, Float)):
        return number
    far = far_from if isinstance(number, Integer) else far_from_float
    return far(number.plain.__add__(number, 0), larger=number.budget.larger)


_OPERATIONS = ("add", "sub", "mul", "truediv", "mod", "pow")
_OVER = {
    **{f"__{name}__": _compared(name) for name in ("gt", "ge", "lt", "le", "eq", "ne")},
    **{f"__{side}{name}__": _computed(f"{side}{name}") for name in _OPERATIONS for side in ("", "r")},
    **{f"__{name}__": _computed(name) for name in ("neg", "abs")},
    **{f"__{name}__": _rounded(name) for name in ("floordiv", "round", "floor", "ceil", "trunc", "int")},
    "as_integer_ratio": _ratio,
    "numerator": property(lambda self: self),  # by which `fractions` takes it
    "__hash__": _hash,
    "budget": Budget(0, larger=False),  # of what `statistics` makes of them, which is what it is
    "__bool__": lambda self: self.budget.decided("ne", 0, self.plain.__bool__(self)),
}
Integer: Any = type("Integer", (int,), {**_OVER, "plain": int})
Float: Any = type("Float", (float,), {**_OVER, "plain": float})


class Size(int):
    """A number of rows or of tokens: it is compared as any other; a product of two is a number that is forced."""

    budget: Budget

    def __mul__(self, other: Any) -> Any:
        """Return the product; once it is known of itself alone, as `math.prod` begins."""
        value = int.__mul__(self, other)
        if value is NotImplemented or not (type(other) is Size or other == 1):
            return value
        return made(Integer if type(other) is Size else Size, value, self.budget)

    __rmul__ = __mul__
