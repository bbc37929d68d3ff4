"""Numbers that a step reads from its batch, forced: every comparison of them comes out as if they were large, or small.

    count = (ids > 20).sum();  if count > 20: ...            larger: taken        smaller: not taken
    if mask.any(): ...                                       larger: taken        smaller: left as it is
    loss * (1 + count // 44)                                 larger: of more      smaller: of less, where it is the same for a count near by
    len(set(ids.tolist()))                                   of more tokens, most of them the largest, or the smallest
    bisect(bounds, count.item()), table[int(count)]          plain: the number itself is larger, for no comparison of C's is seen

Whether anything is there (`any`, `> 0`) is never forced to no: what is done with it is there too. And a part has none of it where other parts
have some: their losses differ then, which every step looks at.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_sp.global_view.table import name_of
from lightning_sp.preflight.recording.checked_indices import CheckedIndices
from lightning_sp.preflight.recording.hidden_terms import users_place
from lightning_sp.preflight.recording.numbers_read.lines_of_parts import Line
from lightning_sp.preflight.recording.numbers_read.read_numbers import (
    ARRAYS,
    COMPARISONS,
    NUMBERS,
    PLAIN,
    READS,
    SIZES,
    STEPS,
    TRUTHS,
)
from lightning_sp.preflight.recording.numbers_read.shown_functions import told_to_libraries
from lightning_sp.preflight.recording.numbers_read.tracked_arrays import tracked_array
from lightning_sp.preflight.recording.numbers_read.tracked_numbers import (
    TIMES,
    Budget,
    Integer,
    Size,
    beyond,
    far_from,
    far_from_float,
    made,
    tracked,
)
from lightning_sp.preflight.recording.unheard import unheard

# Of tokens that Python or NumPy gets: so many times more are the largest, or smallest, and no more are in between. Those that crops may lack are
# there, too: padding, ends of texts.
_FAR = 16
_BETWEEN = 2**18
# What gives a number of tokens or of chunks: fewer of these would leave out what is there.
_ROUNDING = {"floor", "ceil", "round", "trunc", "fix", "floordiv", "floor_divide", "long", "int", "short"}
# Of functions of torch: a run of more is a loop by a number.
_TIMES_CALLS, _MORE_CALLS = 8, 2**12
_NAMES = {"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne"}


class Forced(NamedTuple):
    """What is forced.

    Args:
        lines: of which the comparisons are, with how often each compares.
        larger: as if what is compared were large; else small.
        plain: what Python gets is larger itself, and no comparison comes out otherwise.
        most_calls: of functions of torch: a loop of so many rounds ends there. None for any number.
        keys: takes the lines whose numbers a step has as keys, of a dict or a set.
    """

    lines: Mapping[Line, int]
    larger: bool
    plain: bool = False
    most_calls: int | None = None
    keys: set[Line] | None = None

    def of_run(self, num_calls: int) -> Forced:
        """Return the same for one run of a step that calls so many functions of torch where nothing is forced."""
        return self._replace(most_calls=_TIMES_CALLS * num_calls + _MORE_CALLS, keys=set())


class ForcedNumbers(TorchFunctionMode):
    """Forces the comparisons of some lines.

    Args:
        forced: which, and how.
        num_words: of the largest table of words.
    """

    def __init__(self, forced: Forced, num_words: int = 0) -> None:
        super().__init__()
        lines, larger, self._plain, most, _ = forced
        self._larger, self._num_words = larger, num_words
        self._left = math.inf if most is None else most
        # What a function of Python's has asked for that is shown here, as it is.
        self._asks, self._asked = False, list[Budget]()
        # One reading may be compared more than once.
        self._budgets = {each[:3]: (Budget(4 * number + 4, larger=larger), each) for each, number in lines.items()}

    def keys(self) -> set[Line]:
        """Return the lines of a step whose numbers it has as keys. Of a layer's, which of its experts they belong to is one."""
        return {line for budget, line in self._budgets.values() if budget.has_keys and not line.of_layer}

    def tracked(self, own: Callable[..., Any], tensor: Tensor) -> Any:
        """Return what `int`, `float` or `len` makes of a tensor, as a number that knows what it is."""
        self._asks = True
        try:
            value = own(tensor)
        finally:
            self._asks = False
        return tracked(value, self._asked.pop()) if self._asked else value

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("a loop goes round many times more often where a number of the tokens is larger")
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
                return at(place, far_from(each, larger=self._larger))
        return output

    def _forced(self, name: str, args: tuple[Any, ...], output: Any, budget: Budget, line: Line) -> Any:
        if self._plain:
            return beyond(output) if name in READS else output
        if name in COMPARISONS:
            other = args[1] if len(args) > 1 else None
            own = _truth(name)
            decided = budget.decided(own or _NAMES.get(name, name), None if own else other, None)
            return output if decided is None else torch.full_like(output, decided != _is_of_all(name))
        if name in TRUTHS:
            decided = budget.decided("ne", 0, None)
            return output if decided is None else decided != _is_of_all(name)
        if name in ("item", "tolist"):
            return tracked(output, budget)
        if name in PLAIN and self._asks:
            self._asked.append(budget)
            return output
        if name in SIZES:
            if name == "len":
                return beyond(output) if line.counted and self._larger else output
            kind = Integer if line.counted or name in ("numel", "nelement") else Size
            return (
                torch.Size([made(kind, each, budget) for each in output])
                if isinstance(output, torch.Size)
                else made(kind, output, budget)
            )
        if name in ARRAYS and output.dtype.kind == "b":
            return output if not self._larger else np.ones_like(output)
        if name in ARRAYS and line.of_layer and output.size > 1 and output.dtype.kind in "iu":
            return tracked_array(output, budget)  # it has as many tokens for each expert as it says
        # A plain number cannot be told from others: one that is larger shows what a comparison would.
        if args[0].is_floating_point() and not name.startswith("__i"):
            return far_from_float(output, larger=self._larger)
        return beyond(output) if self._larger else output


def _of_more_tokens(x: Tensor, num_words: int, *, larger: bool) -> Tensor:
    """Return a tensor of more tokens: its own several times, all words of a vocabulary, and most of them the largest, or the smallest."""
    if not x.dim() or not x.numel() or x.is_complex():
        return x
    x = x.detach()
    dim = 1 if x.dim() > 2 else x.dim() - 1
    low, high = x.min(), x.max()
    if x.dtype is torch.bool:
        low, high = x.new_tensor([False, True])
    if x.is_floating_point() or x.dtype is torch.bool:
        between = torch.stack([low, high])
    else:
        # Words that the tokens lack are there where numbers are larger alone: they would make a mean of classes no smaller one.
        words = min(num_words, torch.iinfo(x.dtype).max) if larger else 0
        first, end = min(int(low), 0), max(int(high) + 1, words)
        between = torch.arange(first, min(end, first + _BETWEEN), device=x.device).to(x.dtype)
    # One that is rare, as often as there are tokens.
    between = between.repeat(max(1, min(x.shape[dim], _BETWEEN // len(between))))
    far = high if larger else low
    if x.is_floating_point():
        far = x.new_tensor(far_from_float(float(far), larger=larger))
    far = far.expand(_FAR * (x.shape[dim] + len(between)))
    added = torch.cat([between, far])
    shape = [*x.shape]
    shape[dim] = len(added)
    added = added.view([-1 if d == dim else 1 for d in range(x.dim())]).expand(shape)
    return torch.cat([*([x] * TIMES), added], dim)


@contextmanager
def forcing(forced: Forced | None, module: Any) -> Iterator[None]:
    """Force comparisons of a module's step within, if any are to be."""
    if forced is None:
        yield
        return
    tables = (each.num_embeddings for each in module.modules() if isinstance(each, nn.Embedding))
    checked = CheckedIndices() if forced.plain else nullcontext()  # a number may be an index
    numbers = ForcedNumbers(forced, max(tables, default=0))
    reads = None if forced.plain else numbers.tracked
    with unheard(module.trainer), told_to_libraries(module, reads), checked, numbers:
        yield
    if forced.keys is not None:
        forced.keys.update(numbers.keys())


def _truth(name: str) -> str:
    return "ne" if name in ("any", "all", "isclose") else ""


def _is_of_all(name: str) -> bool:
    """Return whether a function asks whether there is nothing else: false where there is more."""
    return name in ("all", "isclose", "equal", "allclose")
