"""Remainders that a step takes of numbers which grow during its run, and what it compares them with: noted, to be shown before they come.

if self.seen % 8 == 3: labels[:, : self.skipped] = -100      a trial of some batches does not see this line
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Given what a remainder is taken of, its divisor, and a remainder that was asked for: None where none was.
Note = Callable[[int, int, int | None], None]

# For a comparison with c, beside c: so that both answers are shown.
_BESIDE: Mapping[str, int] = {"eq": -1, "ne": -1, "lt": -1, "le": 1, "gt": 1, "ge": -1}
_REMAINDERS = (Tensor.__mod__, Tensor.remainder, torch.remainder, Tensor.fmod, torch.fmod)
_COMPARISONS = {
    each: name
    for name in _BESIDE
    for each in (getattr(Tensor, f"__{name}__"), getattr(Tensor, name), getattr(torch, name))
}
# So far ahead is looked for a remainder.
_FARTHEST = 100_000


class Remainder(NamedTuple):
    """A remainder, `(offset + each * n) % divisor`.

    Args:
        name: of n: "global_step", "current_epoch", or "batches", from now on.
        offset: at n = 0.
        divisor: of it.
        each: what one n adds.
        wanted: a value that a step asks for; None where it asks for none.
    """

    name: str
    offset: int
    divisor: int
    each: int = 1
    wanted: int | None = None

    def at(self, number: int) -> int:
        """Return what it is there."""
        return (self.offset + self.each * number) % self.divisor

    def ahead(self, number: int) -> int | None:
        """Return how far behind a number it is what is wanted for the first time; None if it never is."""
        farthest = min(self.divisor, _FARTHEST)
        return next((each for each in range(1, farthest + 1) if self.at(number + each) == self.wanted), None)


def all_wanted(remainders: Iterable[Remainder]) -> list[Remainder]:
    """Return remainders with what a step asks of each: 0 and the largest where it compares one with nothing, an index say. Sorted."""
    asked: dict[Remainder, set[int]] = {}
    for each in remainders:
        asked.setdefault(each._replace(wanted=None), set()).update(() if each.wanted is None else (each.wanted,))
    return sorted(
        each._replace(wanted=wanted) for each, values in asked.items() for wanted in values or (0, each.divisor - 1)
    )


class NotedNumber(int):
    """A number that notes the remainders taken of it, and of sums with it; copied and saved it is a plain one."""

    note: Note

    def __add__(self, other: Any) -> Any:
        return self._noting(int.__add__(self, other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._noting(int.__sub__(self, other))

    def __mod__(self, divisor: Any) -> Any:
        if not isinstance(divisor, int) or divisor < 2:
            return int.__mod__(self, divisor)
        self.note(int(self), int(divisor), None)
        found = _NotedRemainder(int.__mod__(self, divisor))
        found.asked = lambda wanted: self.note(int(self), int(divisor), wanted % int(divisor))
        found.divisor = int(divisor)
        return found

    def __divmod__(self, divisor: Any) -> Any:
        return int.__floordiv__(self, divisor), self % divisor

    def __and__(self, mask: Any) -> Any:
        is_power = isinstance(mask, int) and mask > 0 and mask & (mask + 1) == 0
        return self % (mask + 1) if is_power else int.__and__(self, mask)

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def _noting(self, value: Any) -> Any:
        return value if value is NotImplemented else noted_number(value, self.note)


class _NotedRemainder(int):
    """A remainder that notes what it is compared with."""

    asked: Callable[[int], None]
    divisor: int

    def __bool__(self) -> bool:
        return self != 0

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def ask(self, comparison: str, other: Any) -> None:
        """Note a comparison."""
        for each in both_answers(comparison, other, self.divisor):
            self.asked(each)


def _comparing(comparison: str) -> Callable[[_NotedRemainder, Any], Any]:
    own = getattr(int, f"__{comparison}__")

    def compare(self: _NotedRemainder, other: Any) -> Any:
        self.ask(comparison, other)
        return own(self, other)

    return compare


for _each in _BESIDE:
    setattr(_NotedRemainder, f"__{_each}__", _comparing(_each))


def noted_number(value: int, note: Note) -> NotedNumber:
    """Return a number that notes.

    Args:
        value: of it.
        note: is told of each remainder.
    """
    number = NotedNumber(value)
    number.note = note
    return number


def both_answers(comparison: str, other: Any, divisor: int) -> tuple[int, ...]:
    """Return remainders of which a comparison is true and false; none where it is the same for all."""
    if not isinstance(other, int) or not 0 <= other < divisor:
        return ()
    return int(other), (int(other) + _BESIDE[comparison]) % divisor


class NotedTensors(TorchFunctionMode):
    """Notes remainders taken of tensors of one number, within.

    Args:
        note: is told of each.
        counted: tensors whose numbers, read by `item()`, note too.
    """

    def __init__(self, note: Note, counted: Sequence[Tensor]) -> None:
        super().__init__()
        self._note = note
        self._counted = counted
        # By id: the tensor, so that no other has its id, what it is a remainder of, and the divisor.
        self._taken: dict[int, tuple[Tensor, int, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and note what it takes."""
        found = func(*args, **(kwargs or {}))
        if not args or not isinstance(args[0], Tensor) or args[0].numel() != 1:
            return found
        if func is Tensor.item and any(args[0] is each for each in self._counted):
            return noted_number(found, self._note) if type(found) is int else found
        if len(args) < 2 or not isinstance(args[1], int):
            return found
        if func in _REMAINDERS and args[1] > 1 and not args[0].requires_grad and not args[0].is_meta:
            self._taken[id(found)] = found, int(args[0]), args[1]
            self._note(int(args[0]), args[1], None)
        elif func in _COMPARISONS and id(args[0]) in self._taken:
            _, value, divisor = self._taken[id(args[0])]
            for each in both_answers(_COMPARISONS[func], args[1], divisor):
                self._note(value, divisor, each)
        return found
