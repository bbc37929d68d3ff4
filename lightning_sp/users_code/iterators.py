"""Iterators that a user's code keeps: what a trial takes from one is there again behind it.

ids = itertools.count()                             a name of a file, an entry, an attribute
next_id = functools.partial(next, ids)              or inside of one
next_id = ids.__next__
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from functools import partial
from itertools import tee
from types import BuiltinMethodType, GeneratorType, MethodType, MethodWrapperType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_sp.users_code.generators import KeptGenerator, TriedGenerator

_ITERATORS: tuple[type, ...] = (
    *(itertools.count, itertools.cycle, itertools.chain, itertools.repeat, itertools.islice, type(tee(())[0])),
    *(
        GeneratorType,
        KeptGenerator,
        TriedGenerator,
        type(iter([])),
        type(iter(())),
        type(iter(range(0))),
        zip,
        map,
        enumerate,
        filter,
        reversed,
        _BaseDataLoaderIter,
    ),
)
# How one is asked for more, by the methods of an iterator that may be kept by themselves: `self.add = average.send`.
_ASKED, _METHODS = ("__next__", "send"), (MethodWrapperType, MethodType, BuiltinMethodType)
# A value of the user's, what a block has in its place, and what is there behind the block.
Copies = dict[int, tuple[Any, Any, Any]]


class Count:
    """`itertools.count` of plain numbers whose next one is known, and can be set."""

    def __init__(self, value: Any, step: Any = 1) -> None:
        self.value, self._step = value, step

    def __iter__(self) -> Count:
        return self

    def __next__(self) -> Any:
        """Return the number, and go on to the next."""
        found, self.value = self.value, self.value + self._step
        return found

    def copy(self) -> Count:
        """Return another one that goes on from here."""
        return Count(self.value, self._step)


def takes_from_iterators(value: Any) -> bool:
    """Return whether a value is an iterator that is exchanged for a block, or calls one."""
    if isinstance(value, partial):
        return type(value) is partial and any(map(takes_from_iterators, (value.func, *value.args)))
    if isinstance(value, _METHODS):
        return getattr(value, "__name__", "") in _ASKED and takes_from_iterators(value.__self__)
    return isinstance(value, Count) or (isinstance(value, _ITERATORS) and isinstance(value, Iterator))


def exchanged(value: Any, copies: Copies) -> tuple[Any, Any]:
    """Return what a block has in the place of such a value, and what is there behind the block: with what the block took of it.

    Args:
        value: for which `takes_from_iterators` is true; any other stays as it is.
        copies: of the same block; one iterator under several names stays one.
    """
    if not takes_from_iterators(value):
        return value, value
    if id(value) not in copies:
        first, kept = _both(value, copies)
        copies[id(value)] = value, first, kept  # with itself: its number is not another's then
    _, first, kept = copies[id(value)]
    return first, kept


def _both(value: Any, copies: Copies) -> tuple[Any, ...]:
    if isinstance(value, partial):
        functions, *args = [exchanged(each, copies) for each in (value.func, *value.args)]
        return tuple(partial(functions[i], *(each[i] for each in args), **value.keywords) for i in (0, 1))
    if isinstance(value, _METHODS):
        first, kept = exchanged(value.__self__, copies)
        return getattr(first, value.__name__), getattr(kept, value.__name__)
    if isinstance(value, TriedGenerator):  # a block within a block
        return value.copy(), value
    if isinstance(value, (GeneratorType, KeptGenerator)):
        kept = value if isinstance(value, KeptGenerator) else KeptGenerator(value)
        return TriedGenerator(kept), kept
    known = value if isinstance(value, Count) else known_count(value)
    return tee(value) if known is None else (known.copy(), known.copy())


def known_count(value: Iterator[Any]) -> Count | None:
    """Return the count of plain numbers that an iterator is, which says its numbers; None for others."""
    if type(value) is not itertools.count:
        return None
    try:
        start, *step = ast.literal_eval(repr(value).removeprefix("count").replace(")", ",)"))
    except (ValueError, SyntaxError):
        return None
    return Count(start, *step)
