"""Tokens that were taken out of a sequence: on one device a view of it, here a copy, for they lie on other ranks.

    y = x[:, 1:]         copied
    y += 1               written to the copy, and from there to x
    x.mul_(2); y.sum()   x was written to, so y is taken again before it is read

Whether a tensor was written to is told by its version, as autograd tells it. A copy keeps its memory: its views see what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_sp.global_view.tensors.deferred import DeferredTensor, made


def memory_of(local: Tensor) -> StorageWeakRef:
    """Return what tells the memory of a tensor from that of others, and keeps none."""
    there = local.blank if isinstance(local, DeferredTensor) else local
    return StorageWeakRef(there.untyped_storage())  # type: ignore[no-untyped-call]


def address_of(local: Tensor, dim: int, taken: Any) -> tuple[Any, ...]:
    """Return what is the same for the same tokens of the same memory.

    Args:
        local: a part of a sequence.
        dim: the sequence's.
        taken: which tokens: a range, or a number.
    """
    there = local.blank if isinstance(local, DeferredTensor) else local
    return memory_of(local), there.storage_offset(), tuple(there.shape), there.stride(), dim, taken


def version_of(local: Tensor) -> Any:
    """Return what is another once a tensor was written to; of one that is not made yet nothing is known until it is."""
    if isinstance(local, DeferredTensor):
        return None if local.source_of_tokens() is not None else version_of(local.make())
    return object() if local.is_inference() else local._version  # an inference tensor counts no writes


@dataclass(eq=False, kw_only=True)
class CopiedView:
    """What a copy is of.

    Args:
        source: the tensor of the sequence that one device has a view of.
        copy: the copied numbers.
        take: copies them again.
        put: writes the copy into the source; None where nothing does.
        address: of the tokens, as `address_of`; None where they are no range.
    """

    source: Any
    copy: Tensor
    take: Callable[[], Tensor]
    put: Callable[[], None] | None
    address: Any = None
    memory: StorageWeakRef = field(init=False)
    _seen: Any = field(init=False)
    _with_graph: bool = field(init=False)

    def __post_init__(self) -> None:
        self.memory, self._with_graph = memory_of(self.copy), torch.is_grad_enabled()
        self.source.placement.storage.plans["copied"] = True
        self._look()

    def is_all(self, value: Tensor, address: Any) -> bool:
        """Return whether a tensor is the copy, as it is, and what it is a copy of has an address: then it stands there already."""
        same = value.shape == self.copy.shape and value.stride() == self.copy.stride()
        return same and value.storage_offset() == self.copy.storage_offset() and self.address == address

    def shares_some(self, address: Any) -> bool:
        """Return whether it is a copy of some tokens of an address, and of others, or of other tokens of its memory."""
        if self.address is None or address is None or self.address[:-1] != address[:-1]:
            return False
        own, other = (range(at, at + 1) if isinstance(at, int) else at for at in (self.address[-1], address[-1]))
        return own != other and bool(set(own) & set(other))

    def _look(self) -> None:
        local = self.source.local
        self._seen = local, version_of(local)

    def renew(self) -> None:
        """Copy the numbers again where the source was written to since. Communicates: as taking them, then alone."""
        local, version = self._seen
        now = self.source.local
        if now is local and version_of(now) == version:
            return
        with torch.set_grad_enabled(self._with_graph):
            self.copy.copy_(made(self.take()))
        self._look()

    def write(self) -> None:
        """Write the copy into the source. Communicates: what the tokens' moves do."""
        assert self.put is not None
        self.put()
        self._look()
