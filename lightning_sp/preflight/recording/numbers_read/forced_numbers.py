"""Numbers that a step reads from its batch, forced: every comparison of them comes out as if they were large, or small.

    count = (ids > 20).sum();  if count > 20: ...            larger: taken        smaller: not taken
    if mask.any(): ...                                       larger: taken        smaller: left as it is
    loss * (1 + count // 44)                                 larger: of more      smaller: of less, where it is the same for a count near by
    len(set(ids.tolist()))                                   of more tokens, most of them the largest, or the smallest

Whether anything is there (`any`, `> 0`) is never forced to no: what is done with it is there too. And a part has none of it where other parts
have some: their losses differ then, which every step looks at.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_sp.global_view.table import name_of
from lightning_sp.preflight.recording.hidden_terms import users_place
from lightning_sp.preflight.recording.numbers_read.read_numbers import (
    ARRAYS,
    COMPARISONS,
    NUMBERS,
    SIZES,
    STEPS,
    TRUTHS,
    Line,
)

# Of a number that Python takes as its own.
_TIMES = 4
# Of tokens that Python or NumPy gets: so many times more are the largest, or smallest, and no more are in between. Those that crops may lack are
# there, too: padding, ends of texts.
_FAR = 16
_BETWEEN = 2**18
# Comparisons of one number that a step keeps.
_MOST = 10_000
# What gives a number of tokens or of chunks: fewer of these would leave out what is there.
_ROUNDING = {"floor", "ceil", "round", "trunc", "fix", "floordiv", "floor_divide", "long", "int", "short"}
_NAMES = {"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne"}
_ABOVE, _BELOW = {"gt", "ge", "ne"}, {"lt", "le", "eq"}


class Forced(NamedTuple):
    """What is forced.

    Args:
        lines: of which the comparisons are, with how often each compares.
        larger: as if what is compared were large; else small.
    """

    lines: Mapping[Line, int]
    larger: bool


class _Budget:
    """How many comparisons are still forced: a loop that waits for one ends; a class because it counts."""

    def __init__(self, left: int, *, larger: bool) -> None:
        self.left, self.larger = left, larger

    def decided(self, name: str, other: Any, own: Any) -> Any:
        """Return how a comparison comes out, by its name and what a number is compared with."""
        if self.left <= 0 or (not self.larger and _asks_for_any(name, other)):
            return own
        self.left -= 1
        return (name in _ABOVE) == self.larger


class ForcedNumbers(TorchFunctionMode):
    """Forces the comparisons of some lines.

    Args:
        forced: which, and how.
        num_words: of the largest table of words.
    """

    def __init__(self, forced: Forced, num_words: int = 0) -> None:
        super().__init__()
        lines, larger = forced
        self._larger, self._num_words = larger, num_words
        # One reading may be compared more than once.
        self._budgets = {each[:3]: (_Budget(4 * number + 4, larger=larger), each) for each, number in lines.items()}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        name = name_of(function)
        if name not in COMPARISONS | STEPS | TRUTHS | NUMBERS | SIZES:
            return output
        place = users_place(sys._getframe(1))
        found = None if place is None else self._budgets.get((*place, name))
        if found is not None and name in STEPS:
            larger_alone = name in _ROUNDING and not self._larger
            return output if larger_alone else self._stepped(function, args, kwargs or {}, output)
        if found is not None and name in ARRAYS and found[1].of_tokens:
            more = _of_more_tokens(args[0], self._num_words, larger=self._larger)
            return function(more, *args[1:], **(kwargs or {}))
        return output if found is None else self._forced(name, args, output, *found)

    def _stepped(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Return what a function gives for a number farther on, where it gives the same for those near by."""

        def at(place: int, value: Tensor) -> Any:
            return function(*args[:place], value, *args[place + 1 :], **kwargs)

        for place, each in enumerate(args):
            if not isinstance(each, Tensor) or each.numel() != output.numel():
                continue
            near = 1e-3 * (each.abs() + 1) if each.is_floating_point() else 1
            if torch.equal(at(place, each + near), output) and torch.equal(at(place, each - near), output):
                return at(place, _farther(each, larger=self._larger))
        return output

    def _forced(self, name: str, args: tuple[Any, ...], output: Any, budget: _Budget, line: Line) -> Any:
        if name in COMPARISONS:
            other = args[1] if len(args) > 1 else None
            own = _truth(name)
            decided = budget.decided(own or _NAMES.get(name, name), None if own else other, None)
            return output if decided is None else torch.full_like(output, decided != _is_of_all(name))
        if name in TRUTHS:
            decided = budget.decided("ne", 0, None)
            return output if decided is None else decided != _is_of_all(name)
        if name in ("item", "tolist"):
            return _numbers(output, budget)
        if name in SIZES:
            if name == "len":
                return output if not (line.counted and self._larger) else _TIMES * (output + 1)
            made = _Integer if line.counted or name in ("numel", "nelement") else _Size
            return (
                torch.Size([_made(made, each, budget) for each in output])
                if isinstance(output, torch.Size)
                else _made(made, output, budget)
            )
        if name in ARRAYS and output.dtype.kind == "b":
            return output if not self._larger else np.ones_like(output)
        # Python's own int and float cannot be told from others: one that is larger shows what a comparison would.
        return _TIMES * (output + 1) if self._larger else output


def _of_more_tokens(x: Tensor, num_words: int, *, larger: bool) -> Tensor:
    """Return a tensor of more tokens: its own several times, all words of a vocabulary, and most of them the largest, or the smallest."""
    if not x.dim() or not x.numel() or x.is_complex():
        return x
    x = x.detach()
    dim = 1 if x.dim() > 2 else x.dim() - 1
    low, high = x.min(), x.max()
    if x.is_floating_point() or x.dtype is torch.bool:
        between = torch.stack([low, high])
    else:
        first, end = min(int(low), 0), max(int(high) + 1, min(num_words, torch.iinfo(x.dtype).max))
        between = torch.arange(first, min(end, first + _BETWEEN), device=x.device).to(x.dtype)
    far = (high if larger else low).expand(_FAR * (x.shape[dim] + len(between)))
    added = torch.cat([between, far])
    shape = [*x.shape]
    shape[dim] = len(added)
    added = added.view([-1 if d == dim else 1 for d in range(x.dim())]).expand(shape)
    return torch.cat([*([x] * _TIMES), added], dim)


def _farther(number: Any, *, larger: bool) -> Any:
    """Return a number that is larger, or smaller, than those of whole batches are likely to be."""
    return number + (1 if larger else -1) * _TIMES * (abs(number) + 1)


def forcing(forced: Forced | None, module: nn.Module) -> AbstractContextManager[Any]:
    """Force comparisons of a module's step within, if any are to be."""
    if forced is None:
        return nullcontext()
    tables = (each.num_embeddings for each in module.modules() if isinstance(each, nn.Embedding))
    return ForcedNumbers(forced, max(tables, default=0))


def _truth(name: str) -> str:
    return "ne" if name in ("any", "all", "isclose") else ""


def _is_of_all(name: str) -> bool:
    """Return whether a function asks whether there is nothing else: false where there is more."""
    return name in ("all", "isclose", "equal", "allclose")


def _asks_for_any(name: str, other: Any) -> bool:
    """Return whether a comparison asks whether there is anything."""
    number = (
        float(other) if isinstance(other, (int, float)) or (isinstance(other, Tensor) and other.numel() == 1) else None
    )
    if other is None:
        return True
    return number == 0 or (number == 1 and name in ("ge", "lt"))


# ---- numbers of Python's that know what they are


def _made(kind: Any, value: Any, budget: _Budget) -> Any:
    number = kind(value)
    number.budget = budget
    return number


def tracked_number(value: float, *, larger: bool) -> float:
    """Return a number of Python's that is what it is, but for comparisons: as if it were large, or small."""
    found: float = _made(_Float, value, _Budget(_MOST, larger=larger))
    return found


def _numbers(value: Any, budget: _Budget) -> Any:
    if isinstance(value, list):
        return [_numbers(each, budget) for each in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _made(_Integer if isinstance(value, int) else _Float, value, budget)
    return value


def _compared(name: str) -> Any:
    def compare(self: Any, other: Any) -> Any:
        own = getattr(self.plain, f"__{name}__")(self, other)
        return own if own is NotImplemented else self.budget.decided(name, other, own)

    return compare


def _computed(name: str) -> Any:
    def compute(self: Any, *others: Any) -> Any:
        value = getattr(self.plain, f"__{name}__")(self, *others)
        return value if value is NotImplemented else _numbers(value, self.budget)

    return compute


def _rounded(name: str) -> Any:
    def rounds(self: Any, *others: Any) -> Any:
        own = self.plain.__add__(self, 0)  # a plain one: `int(self)` would come here
        number = self.plain(_farther(own, larger=True)) if self.budget.larger else own
        return getattr(self.plain, f"__{name}__")(number, *others)

    return rounds


def _ratio(self: Any) -> tuple[int, int]:
    """Return what `statistics` takes a number by."""
    ratio: tuple[int, int] = farther(self, larger=self.budget.larger).as_integer_ratio()
    return ratio


def farther(number: Any, *, larger: bool) -> Any:
    """Return a plain number that is larger than one of `tracked_number`, or smaller; of any other that number itself."""
    return (
        _farther(number.plain.__add__(number, 0), larger=larger) if isinstance(number, (_Integer, _Float)) else number
    )


_OPERATIONS = ("add", "sub", "mul", "truediv", "mod", "pow")
_OVER = {
    **{f"__{name}__": _compared(name) for name in ("gt", "ge", "lt", "le", "eq", "ne")},
    **{f"__{side}{name}__": _computed(f"{side}{name}") for name in _OPERATIONS for side in ("", "r")},
    **{f"__{name}__": _computed(name) for name in ("neg", "abs")},
    **{f"__{name}__": _rounded(name) for name in ("floordiv", "round", "floor", "ceil", "trunc", "int")},
    "as_integer_ratio": _ratio,
    "budget": _Budget(0, larger=False),  # of what `statistics` makes of them, which is what it is
    "__bool__": lambda self: self.budget.decided("ne", 0, self.plain.__bool__(self)),
}
_Integer: Any = type("_Integer", (int,), {**_OVER, "__hash__": int.__hash__, "plain": int})
_Float: Any = type("_Float", (float,), {**_OVER, "__hash__": float.__hash__, "plain": float})


class _Size(int):
    """A number of rows or of tokens: it is compared as any other; a product of two is a number that is forced."""

    budget: _Budget

    def __mul__(self, other: Any) -> Any:
        """Return the product; once it is known of itself alone, as `math.prod` begins."""
        value = int.__mul__(self, other)
        if value is NotImplemented or not (type(other) is _Size or other == 1):
            return value
        return _made(_Integer if type(other) is _Size else _Size, value, self.budget)

    __rmul__ = __mul__
