"""Copies of weights in another dtype, as autocast makes them for its products: recognised when they are made, by the memory that they are of.

    a copy of a parameter's memory, or of a part of it, by its first cast in a block    as many bytes whatever the step's length
    a copy of memory that this block has cast already                                   may be made for some tokens each: counts for each token
    a copy of anything else                                                             is none

Shapes say nothing: an activation may have a weight's. A part may be longer in a longer step, so that it counts as the whole weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sp.weights.autocast import AutocastWeight

_CAST = torch.ops.aten._to_copy.default


@dataclass
class _WeightInBlock:
    """What a block makes of one weight; a class because its parts may be cast one by one.

    Args:
        num_bytes: of the whole weight in the dtype of the casts.
        parts: the elements that were cast, from the first one up to one.
        casts: they may be freed, and their memory's names used again, were they not referred to.
    """

    num_bytes: int
    parts: list[tuple[int, int]] = field(default_factory=list)
    casts: list[StorageWeakRef] = field(default_factory=list)


class WeightCasts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the casts of a model's weights while it is entered.

    Args:
        root: the model.
    """

    # flex_attention and others pass through it.
    supports_higher_order_operators = True

    def __init__(self, root: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._root, self._block, self._number = root, root, -1
        # By the number of the block, -1 outside of them, and the weight's memory.
        self._weights: dict[tuple[int, int], _WeightInBlock] = {}
        self._made: set[int] = set()

    @contextmanager
    def within(self, number: int, block: nn.Module) -> Iterator[None]:
        """Count what is cast meanwhile to a block."""
        before = self._number, self._block
        self._number, self._block = number, block
        try:
            yield
        finally:
            self._number, self._block = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is _CAST:
            self._note(_numbers(args[0]), made)
        return made

    def is_cast(self, storage: int) -> bool:
        """Return whether memory is a cast of a weight, by `storage_key`."""
        return storage in self._made

    def held_bytes(self) -> dict[int, int]:
        """Return the bytes of the casts that are alive, of each block by its number; -1 outside of blocks, and for those that autocast keeps."""
        held: dict[int, int] = {}
        for (number, _), weight in self._weights.items():
            if not all(cast.expired() for cast in weight.casts):  # type: ignore[no-untyped-call]
                held[number] = held.get(number, 0) + weight.num_bytes
        return held

    def _note(self, given: Tensor, made: Tensor) -> None:
        if not all(_has_memory(each) for each in (given, made)):
            return
        storage = given.untyped_storage()
        if storage._cdata not in {storage_key(each) for each in self._block.parameters() if _has_memory(each)}:
            return
        # What autocast keeps is there until it ends, whether a block is computed again or not.
        number = -1 if _autocast_keeps() else self._number
        num_bytes = storage.nbytes() // given.element_size() * made.element_size()
        weight = self._weights.setdefault((number, storage._cdata), _WeightInBlock(num_bytes=num_bytes))
        first = int(given.storage_offset())
        end = first + 1 + sum((n - 1) * stride for n, stride in zip(given.shape, given.stride(), strict=True))
        if given.numel() > end - first or any(first < b and a < end for a, b in weight.parts):
            return  # expanded, or cast before
        weight.parts.append((first, end))
        weight.casts.append(StorageWeakRef(made.untyped_storage()))  # type: ignore[no-untyped-call]
        self._made.add(storage_key(made))


def storage_key(tensor: Tensor) -> int:
    """Return what names a tensor's memory as long as that is there; views have the same."""
    return int(_numbers(tensor).untyped_storage()._cdata)


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.numbers if isinstance(tensor, AutocastWeight) else tensor


def _has_memory(tensor: Tensor) -> bool:
    numbers = _numbers(tensor)
    return type(numbers) in (Tensor, nn.Parameter) and numbers.layout == torch.strided


def _autocast_keeps() -> bool:
    """Return whether autocast may keep a cast that is made now. Within one of its own it says that it is off: its depth tells."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth > 0 and torch.is_autocast_cache_enabled()
