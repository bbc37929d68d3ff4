"""What tensors, arrays and counts were, and others like them to write to: by their memory, so that views of one memory are views of one."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_sp.users_code.iterators import known_count

_TENSORS = frozenset((Tensor, nn.Buffer))


class _View(NamedTuple):
    """How a tensor lies in its memory."""

    tensor: Tensor
    memory: int
    offset: Any
    size: torch.Size
    stride: tuple[int, ...]


class Copies:
    """Copies of values. A class because they are compared with what the values are later, and more copies are made of them."""

    def __init__(self) -> None:
        self._views: dict[int, _View] = {}
        # Of each memory by its number: itself, and its bytes as they were.
        self._memory: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        # Of other values: themselves, and copies.
        self._others: dict[int, tuple[Any, Any]] = {}

    def __contains__(self, value: Any) -> bool:
        """Return whether there is a copy of a value."""
        return id(value) in self._views or id(value) in self._others

    def add(self, value: Any) -> None:
        """Copy a tensor for which `num_bytes` is no None, an array, bytes that can be written, or a count; leave anything else alone."""
        if value in self:
            return
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage._cdata not in self._memory:
                self._memory[storage._cdata] = storage, _bytes(storage).clone()
            self._views[id(value)] = _View(value, storage._cdata, value.storage_offset(), value.shape, value.stride())
        elif isinstance(value, (np.ndarray, array, bytearray)):
            self._others[id(value)] = value, value.copy() if isinstance(value, np.ndarray) else value[:]
        elif type(value) is itertools.count and (count := known_count(value)) is not None:
            self._others[id(value)] = value, count

    def drop(self, value: Tensor) -> None:
        """Forget a tensor's copy."""
        view = self._views.pop(id(value), None)
        if view is not None and not any(each.memory == view.memory for each in self._views.values()):
            del self._memory[view.memory]

    def has_changed(self, value: Any) -> bool:
        """Return whether a value that is copied is not what it was. A tensor waits for its device."""
        if id(value) in self._others:
            _, before = self._others[id(value)]
            return not np.array_equal(value, before) if isinstance(value, np.ndarray) else repr(value) != repr(before)
        view = self._views[id(value)]
        storage, before = self._memory[view.memory]
        is_same = value.untyped_storage()._cdata == view.memory and value.shape == view.size
        return not is_same or not torch.equal(_bytes(storage), before)

    def put_back(self, value: Any) -> None:
        """Write into a value what it was."""
        if id(value) in self._views:
            storage, before = self._memory[self._views[id(value)].memory]
            _bytes(storage).copy_(before)
        elif isinstance(value, np.ndarray):
            np.copyto(value, self._others[id(value)][1])
        elif isinstance(value, (array, bytearray)):
            value[:] = self._others[id(value)][1]

    def stand_ins(self) -> Callable[[Any], Any]:
        """Return a function that gives for each value another one that is what it was, and the value itself where there is no copy of it."""
        made: dict[int, Any] = {}
        memory: dict[int, torch.UntypedStorage] = {}

        def of(value: Any) -> Any:
            if id(value) not in made:
                made[id(value)] = self._stand_in(value, memory)
            return made[id(value)]

        return of

    def _stand_in(self, value: Any, memory: dict[int, torch.UntypedStorage]) -> Any:
        if id(value) in self._others:
            _, before = self._others[id(value)]
            return before.copy() if hasattr(before, "copy") else before[:]
        if id(value) not in self._views:
            return value
        view = self._views[id(value)]
        if view.memory not in memory:
            memory[view.memory] = self._memory[view.memory][1].clone().untyped_storage()
        made = torch.empty(0, dtype=view.tensor.dtype, device=view.tensor.device)
        return made.set_(memory[view.memory], view.offset, view.size, view.stride)


def num_bytes(value: Any) -> int | None:
    """Return the bytes of a tensor's memory; None where it is not copied: of a class of its own, sparse, quantized, freed, with a gradient."""
    if type(value) not in _TENSORS or value.layout is not torch.strided or value.requires_grad:
        return None
    if value.is_meta or value.is_quantized or value.is_nested or value.is_conj() or value.is_neg():
        return None
    size = value.untyped_storage().nbytes()
    return None if value.numel() and not size else size


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
