"""Where a tensor's sequence is: which dim shows it, how long it is, and which of its tokens this rank has.

A dim of the shape that is shown may be more than the sequence: (batch, tokens) viewed as one dim is `outer` sequences one after the other,
(tokens, features) viewed as one dim has `inner` numbers for each token:

    shown    (..., outer * L * inner, ...)      L tokens, the first of `storage.capacity`
    local    (..., outer * s * inner, ...)      s = capacity / ranks of the sequence; what lies behind L is padding, and its value means nothing
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm, layout
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.global_view.tensors.copied_views import CopiedView, memory_of
from lightning_sp.layout import SequenceLayout


@dataclass(frozen=True, eq=False, kw_only=True)
class Storage:
    """Which tokens each rank of a sequence has, for one step.

    Args:
        layout: of `capacity` tokens over the ranks.
        rank: of this process among them.
        capacity: tokens with the padding, a multiple of what the degrees divide.
        group: the ranks that share the sequence.
        attend: attention of (B, H, s, D) queries, keys and values, as `rewrite.whole_attention` gives it.
        note_reduction: called once for each reduction over the sequence.
        dispatch: does what the table of rules says of a function, the types of its tensors, its arguments and its keyword arguments.
        sequence: what is known of the whole.
        plans: of the moves of tokens that the step has made.
        own_draws: while it is entered this rank draws numbers of its own; else the ranks of a sequence draw alike.
        draws_whole: random numbers of the sequence's shape are drawn whole, alike on all its ranks, of which each takes its part: a trial's,
            which is compared with one device's from the same seed.
        agree: raises an error that a rank has on all ranks of the step; every rank must call it.
        places: the positions of each rank's tokens, where they are not those of the layout; on the CPU, (ranks, s).
        block: tokens of the batch's sequence that each of this one's stands for; 0 where they are not blocks.
        root: of the batch's own sequence; None for itself.
        number: of the batch's sequence among its own.
        is_traced: it stands for another while a compiler traces (`traced`): numbers of tokens may be symbols.
        only_shapes: and shapes alone are asked of it.
    """

    layout: SequenceLayout
    rank: int
    capacity: int
    group: ProcessGroup
    attend: Callable[..., Tensor]
    note_reduction: Callable[[], None]
    dispatch: Callable[[Any, Collection[type], tuple[Any, ...], dict[str, Any]], Any]
    sequence: SequenceInfo
    agree: Callable[[str | None], None]
    own_draws: Callable[[], AbstractContextManager[None]]
    draws_whole: bool = False
    places: Tensor | None = None
    block: int = 0
    root: Storage | None = None
    number: int = 0
    is_traced: bool = False
    only_shapes: bool = False
    plans: dict[Any, Any] = field(default_factory=dict)
    _positions: dict[torch.device, Tensor] = field(default_factory=dict)
    _others: dict[Any, Storage] = field(default_factory=dict)

    @cached_property
    def local_tokens(self) -> int:
        """s, this rank's tokens."""
        return self.capacity // self.layout.size

    def for_length(self, length: int) -> Storage:
        """Return what holds so many tokens: this, or one of more."""
        if length <= self.capacity:
            return self
        self._check_numbers()
        own = self if self.root is None or self.block else self.root
        if own is not self and length <= own.capacity:
            return own
        return own._other(own.layout.padded_length(length), block=own.block)

    def fitting(self, length: int) -> Storage:
        """Return what holds so many tokens: this, one of more, or where this would be half empty and more, one of as few as that needs.

        A stack of strided convolutions makes 20 frames of 6,400 samples, and what is computed of them is as long as their storage.
        """
        if length > self.capacity or self.block or self.is_traced:
            return self.for_length(length)
        capacity = self.layout.padded_length(length)
        own = self.root or self
        return self if 2 * capacity > self.capacity or own.block else own._other(capacity)

    def of_blocks(self, number: int, block: int) -> Storage:
        """Return what holds so many blocks of tokens, each block whole on a rank."""
        self._check_numbers()
        own = self.root or self
        return own._other(own.layout.padded_length(number), block=block)

    def within_blocks(self) -> Storage:
        """Return the tokens of blocks, each where its block is."""
        ranks, block = range(self.layout.size), torch.arange(self.block)
        places = torch.stack([(self.positions_of(rank)[:, None] * self.block + block).flatten() for rank in ranks])
        return self._other(self.capacity * self.block, places=places)

    def of_places(self, places: Tensor) -> Storage:
        """Return what holds tokens at any places. Shapes: (ranks, s), each place once."""
        return self._other(places.numel(), places=places)

    def _other(self, capacity: int, block: int = 0, places: Tensor | None = None) -> Storage:
        key = (capacity, block, None if places is None else places.numpy().tobytes())
        if key not in self._others:
            layout = self.layout.for_length(capacity) if places is None else self.layout
            sequence = replace(
                self.sequence, length=capacity, padded_length=capacity, boundaries=None, valid=None, visible_keys=None, layout=layout
            )  # fmt: skip
            self._others[key] = replace(
                self, layout=layout, capacity=capacity, sequence=sequence, places=places, block=block, root=self.root or self,
                plans={}, _positions={}, _others={},
            )  # fmt: skip
        return self._others[key]

    def _check_numbers(self) -> None:
        if self.is_traced:
            raise NotImplementedError(
                "global_view: a plan of which token goes where is made for one length: not compiled"
            )

    def positions_of(self, rank: int) -> Tensor:
        """Return the positions of a rank's tokens, on the CPU. Shapes: () -> (s,)."""
        self._check_numbers()
        return layout.positions(self.layout, self.capacity, rank) if self.places is None else self.places[rank]

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens. Shapes: () -> (s,)."""
        if device not in self._positions:
            self._positions[device] = self.positions_of(self.rank).to(device)
        return self._positions[device]

    def merged(self, parts: list[Tensor], dim: int) -> Tensor:
        """Return the whole from the parts of all ranks. Shapes: ranks x (..., s, ...) -> (..., capacity, ...)."""
        if self.places is None:
            return layout.merge(parts, self.layout, dim=dim)
        self._check_numbers()
        return torch.cat(parts, dim).index_select(dim, self.places.flatten().argsort().to(parts[0].device))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The dim of a shown tensor that has the sequence.

    Args:
        storage: which tokens each rank has.
        dim: of the tensor, from 0.
        length: L, tokens that are shown.
        outer: sequences of the dim one after the other.
        inner: numbers of a token in the dim.
        copied: what a slice is a copy of, of which one device has a view; None for what is no slice.
    """

    storage: Storage
    dim: int
    length: int
    outer: int = 1
    inner: int = 1
    copied: CopiedView | None = field(default=None, compare=False)

    @property
    def shown(self) -> int:
        """The size of the dim as it is shown."""
        return self.outer * self.length * self.inner

    @property
    def held(self) -> int:
        """The size of the dim on this rank."""
        return self.outer * self.storage.local_tokens * self.inner

    @property
    def has_padding(self) -> bool:
        """Whether some rank holds tokens that are not shown."""
        return self.length < self.storage.capacity

    def at(self, dim: int) -> Placement:
        """Return the same along another dim."""
        return replace(self, dim=dim)

    def as_copy(self, view: CopiedView) -> Placement:
        """Return the same of a slice whose numbers are a copy of another tensor's."""
        return replace(self, copied=view)

    def is_copy(self, local: Tensor) -> bool:
        """Return whether a local tensor is a slice that is a copy, or a view of one."""
        return self.copied is not None and memory_of(local) == self.copied.memory

    def same_tokens(self, other: Placement) -> bool:
        """Return whether another tensor's dim has the same tokens in the same places, whichever dim it is."""
        return self.storage is other.storage and (self.length, self.outer, self.inner) == (
            other.length,
            other.outer,
            other.inner,
        )

    def split(self, local: Tensor) -> Tensor:
        """Return a view in which the tokens have a dim of their own. Shapes: (..., outer * s * inner, ...) -> (..., outer, s, inner, ...)."""
        return split_dim(local, self.dim, (self.outer, self.storage.local_tokens, self.inner))

    def real(self, local: Tensor) -> Tensor | None:
        """Return which numbers of a local tensor are shown, broadcastable to it; None where all are. Shapes: () -> (1, ..., held, 1, ...)."""
        if not self.has_padding:
            return None
        real = self.storage.positions(local.device) < self.length
        real = real[None, :, None].expand(self.outer, -1, self.inner).reshape(-1)
        shape = [1] * local.dim()
        shape[self.dim] = -1
        return real.view(shape)

    def without_padding(self, local: Tensor, value: Any) -> Tensor:
        """Return a local tensor with a value in place of its padding."""
        real = self.real(local)
        return (
            local
            if real is None
            else torch.where(real, local, torch.full((), value, dtype=local.dtype, device=local.device))
        )


def gathered(local: Tensor, placement: Placement) -> Tensor:
    """Return what is shown, whole, on every rank. Shapes: (..., held, ...) -> (..., shown, ...).

    Communicates: one all_gather over the ranks of the sequence; in the backward one all_to_all.
    """
    storage, dim = placement.storage, placement.dim
    parts = comm.gather_over_ranks(_sendable(placement.split(local)), storage.group)
    whole = storage.merged(parts, dim + 1).narrow(dim + 1, 0, placement.length)
    whole = whole.flatten(dim, dim + 2)
    return whole.bool() if local.dtype == torch.bool else whole


def _sendable(tensor: Tensor) -> Tensor:
    tensor = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    return tensor.contiguous()


def part_of(whole: Tensor, placement: Placement) -> Tensor:
    """Return this rank's part of a whole tensor; padding repeats the last token. Shapes: (..., shown, ...) -> (..., held, ...)."""
    dim, storage = placement.dim, placement.storage
    split = split_dim(whole, dim, (placement.outer, placement.length, placement.inner))
    index = storage.positions(whole.device).clamp(max=placement.length - 1)
    return split.index_select(dim + 1, index).flatten(dim, dim + 2)


def split_dim(tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return a view with a dim split."""
    return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that some broadcast to."""
    found: tuple[int, ...] = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return found
