"""What modules keep, noted at one time: attributes and buffers, what lists, dicts and the user's own objects hold, random generators.

noted.visit(modules)        before a forward
noted.settle(written)       behind it: only what is needed to show it again
take_back = noted.show()    all is as it was, with copies in the place of what may be written to
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Collection
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sp.parallelize.recomputation.copies import Copies, num_bytes
from lightning_sp.users_code.contents import Place, places_of
from lightning_sp.users_code.random_generators import RandomGenerator, is_kind_of_generator

# In bytes of memory: what is copied in each call, and in the first. Of longer lists of tensors none is copied in each call.
_SMALL, LARGEST, _MOST_TENSORS = 1 << 16, 1 << 26, 1000
# The elements of longer lists and dicts are not looked into, nor what is behind so many elements in all.
_MOST_VISITED, MOST = 10_000, 20_000
_FEW_PLACES = 100
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size))
_COPIED = (np.ndarray, array, bytearray, itertools.count)
# A list, dict or object, and a name in it.
Name = tuple[int, Any]


class NotedState:
    """What is kept at one time. A class because what is noted before a forward is compared, thinned and shown behind it.

    Args:
        written: the names of larger tensors that are copied.
        is_first: copy all larger ones.
        visited: what is not looked at, by its number.
        fixed: what others have, too, by its number: it is not copied.
        most: of how many lists, dicts and elements in them it looks at the elements.
    """

    def __init__(
        self,
        written: set[Name],
        *,
        is_first: bool = False,
        visited: set[int] | None = None,
        fixed: set[int] | None = None,
        most: int = MOST,
    ) -> None:
        self._most, self._fixed = most, fixed or set()
        self.visited = set() if visited is None else set(visited)
        self._written, self._is_first = written, is_first
        self._places: list[tuple[Place, Any]] = []
        self._generators: list[RandomGenerator] = []
        self._copies = Copies()
        # Tensors that are written to seldom: their names, and the count of writes to each.
        self._larger: list[tuple[Name, Tensor, int | None]] = []

    def visit(self, waiting: list[Any]) -> None:
        """Look at values, and at what they hold."""
        while waiting:
            value = waiting.pop()
            if id(value) in self.visited:
                continue
            self.visited.add(id(value))
            kind: type = type(value)
            if is_kind_of_generator(kind):
                self._generators.append(RandomGenerator(value))
                continue
            for place in [value] if type(value) is Place else places_of(value):
                contents = place.read()
                self._places.append((place, contents))
                if 0 < len(contents) <= min(_MOST_VISITED, self._most):
                    self._most -= len(contents)
                    names = contents.items() if type(contents) is dict else enumerate(contents)
                    found = [each for each in names if type(each[1]) not in _PLAIN]
                    self._copy(place, contents, found)
                    waiting += [each for _, each in found]

    def _copy(self, place: Place, contents: Any, found: list[tuple[Any, Any]]) -> None:
        can_show = place.put is not None and type(contents) is not set
        for name, value in found:
            if isinstance(value, Tensor):
                self._copy_tensor((id(place.holder), name), value, can_show, len(found) <= _MOST_TENSORS)
            elif can_show and isinstance(value, _COPIED) and getattr(value, "nbytes", 0) <= LARGEST:
                self._copies.add(value)

    def _copy_tensor(self, name: Name, value: Tensor, can_show: bool, are_few: bool) -> None:
        size = num_bytes(value) if can_show else None
        if size is None or size > _SMALL or not are_few:
            self._larger.append((name, value, _count(value)))
        if size is not None and (
            (size <= _SMALL and are_few) or (self._is_first and size <= LARGEST) or name in self._written
        ):
            self._copies.add(value)

    def names_written(self) -> set[Name]:
        """Return the names of the larger tensors that are copied, and are not what they were."""
        copied = [each for each in self._larger if each[1] in self._copies]
        return {name for name, value, count in copied if _count(value) != count or self._copies.has_changed(value)}

    def written_without_copy(self) -> tuple[Any, Tensor] | None:
        """Return the name of a tensor that was written to and has no copy, and the tensor; None where there is none."""
        for (_, name), tensor, count in self._larger:
            if tensor not in self._copies and _count(tensor) != count:
                return name, tensor
        return None

    def settle(self, written: set[Name]) -> None:
        """Behind the forward, let go of what no recomputation reads: copies of what was not written to, and graphs of earlier steps."""
        for name, tensor, _ in self._larger:
            if name not in written:
                self._copies.drop(tensor)
        self._larger.clear()
        self.visited.clear()
        if any(_has_graph(value) for _, contents in self._places for value in _values(contents)):
            self._let_graphs_go()

    def _let_graphs_go(self) -> None:
        """Keep the numbers of tensors that have a graph, and not the graph: it may hold the checkpoint of an earlier step, which holds another.

        What holds such tensors and is itself held is copied, as it was; it need not be shown by itself then.
        """
        made: dict[int, Any] = {}

        def without(value: Any) -> Any:
            if _has_graph(value) and id(value) not in made:
                made[id(value)] = value.detach().requires_grad_()
            return made.get(id(value), value)

        def mapped(contents: Any) -> Any:
            if isinstance(contents, dict):
                return {name: without(value) for name, value in contents.items()}
            return type(contents)(map(without, contents))

        held = {id(value) for _, contents in self._places for value in _values(contents)} - self._fixed
        for place, contents in reversed(self._places):  # what holds others was looked at before them
            holder, bears = place.holder, any(_has_graph(value) or id(value) in made for value in _values(contents))
            if bears and id(holder) in held and id(holder) not in made and not isinstance(holder, nn.Module):
                made[id(holder)] = copy(holder) if place.put is not None else _tuple_like(holder, mapped(contents))
        others: dict[int, list[Place]] = {}
        for place, contents in self._places:
            if id(place.holder) in made and place.put is not None:
                of_copy = others.setdefault(id(place.holder), places_of(made[id(place.holder)]))
                _put([(of_copy.pop(0), mapped(contents))])
        self._places = [(place, mapped(contents)) for place, contents in self._places if id(place.holder) not in made]

    def keep_changed(self) -> None:
        """Forget what is as it was, but for what holds something that is not."""
        changed: set[int] = set()
        kept = []
        for place, contents in reversed(self._places):  # what holds others was looked at before them
            if self._has_changed(place, contents) or not changed.isdisjoint(map(id, _values(contents))):
                changed.add(id(place.holder))
                kept.append((place, contents))
        self._places = kept[::-1]
        self._generators = [each for each in self._generators if each.has_drawn]

    def _has_changed(self, place: Place, contents: Any) -> bool:
        copied = [each for each in _values(contents) if each in self._copies]
        return not _is_same(place.read(), contents) or any(map(self._copies.has_changed, copied))

    @property
    def is_small(self) -> bool:
        """Whether it costs little to look at all of it in each call."""
        return (
            len(self._places) <= _FEW_PLACES and sum(len(contents) for _, contents in self._places) <= 20 * _FEW_PLACES
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to be shown."""
        return not self._places and not self._generators

    def roots(self) -> list[Any]:
        """Return where it looked, but for what is held by something else there, which may hold another then."""
        held = {id(value) for _, contents in self._places for value in _values(contents)}
        return [place for place, _ in self._places if id(place.holder) not in held] + [
            each.generator for each in self._generators
        ]

    def show(self) -> Callable[[], None]:
        """Let everything be as it was; return what takes that back."""
        now = [(place, place.read()) for place, _ in self._places]
        generators = [RandomGenerator(each.generator) for each in self._generators]
        stand_in = self._copies.stand_ins()
        shown = _put([(place, _mapped(stand_in, contents)) for place, contents in self._places])
        for each in self._generators:
            each()

        def take_back() -> None:
            _put(now, shown)
            for each in generators:
                each()

        return take_back

    def put_back(self) -> None:
        """Let everything be as it was, in the same tensors and arrays."""
        with torch.no_grad():
            for place, contents in self._places:
                for value in (each for each in _values(contents) if each in self._copies):
                    self._copies.put_back(value)
                _put([(place, contents)])
        for each in self._generators:
            each()


def _mapped(function: Callable[[Any], Any], contents: Any) -> Any:
    if isinstance(contents, dict):
        return {name: function(value) for name, value in contents.items()}
    return contents if isinstance(contents, set) else [function(value) for value in contents]


def _tuple_like(holder: Any, contents: list[Any]) -> Any:
    """Return a tuple, or a function with arguments, that holds others."""
    if isinstance(holder, partial):
        num = len(holder.args)
        return partial(holder.func, *contents[:num], **dict(zip(holder.keywords, contents[num:], strict=True)))
    return type(holder)(*contents) if hasattr(holder, "_fields") else tuple(contents)


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def _put(places: list[tuple[Place, Any]], shown: Collection[int] = ()) -> set[int]:
    """Put contents where they are not there, and where others were shown; return the numbers of those places."""
    done = set()
    for number, (place, contents) in enumerate(places):
        if place.put is not None and (number in shown or not _is_same(place.read(), contents)):
            place.put(contents)
            done.add(number)
    return done


def _values(contents: Any) -> Any:
    return contents.values() if isinstance(contents, dict) else contents


def _is_same(a: Any, b: Any) -> bool:
    """Return whether two contents are of the same objects under the same names."""
    if isinstance(a, set):
        return bool(a == b)
    if isinstance(a, dict) and a.keys() != b.keys():
        return False
    return [*map(id, _values(a))] == [*map(id, _values(b))]


def _count(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None where torch does not count that."""
    return None if tensor.is_inference() or tensor.is_meta else tensor._version
