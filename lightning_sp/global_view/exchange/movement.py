"""Tokens that go to other places of the sequence: what a slice, a shift, a flip, padding or a join along the sequence does.

    moved(x, index)[..., i, ...] = x[..., index[i], ...], or the fill where index[i] is -1

Each rank sends the tokens that others show, and no others: for a shift those at the edges of what a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.global_view.tensors.deferred import DeferredTensor, by_source, made
from lightning_sp.global_view.tensors.placement import Storage
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """What a rank sends and where what it gets goes.

    Args:
        sent: slots of this rank's tokens, for rank after rank.
        num_sent: how many for each.
        received: slots of the result, in the order in which tokens arrive.
        num_received: how many from each.
        filled: which slots of the result get the fill, or lie behind it.
    """

    sent: Tensor
    num_sent: tuple[int, ...]
    received: Tensor
    num_received: tuple[int, ...]
    filled: Tensor


def plan_of(index: Tensor, source: Storage, target: Storage, device: torch.device) -> Plan:
    """Return the plan of a rank. Pure: every rank makes its own from the same index. Shapes: index (L,), on the CPU."""
    size = source.layout.size
    slot_of, owner_of = torch.zeros(source.capacity, dtype=torch.int64), torch.zeros(source.capacity, dtype=torch.int64)
    wanted = []
    behind = index[-1:].expand(target.capacity - len(index))  # padding repeats the last token
    whole = torch.cat([index, behind])
    for rank in range(size):
        own = source.positions_of(rank)
        slot_of[own], owner_of[own] = torch.arange(len(own)), rank
        wanted.append(whole[target.positions_of(rank)])
    mine = wanted[source.rank]
    to_each = [slot_of[each[(each >= 0) & (owner_of[each] == source.rank)]] for each in wanted]
    from_each = [torch.nonzero((mine >= 0) & (owner_of[mine] == rank)).flatten() for rank in range(size)]
    return Plan(
        sent=torch.cat(to_each).to(device),
        num_sent=tuple(map(len, to_each)),
        received=torch.cat(from_each).to(device),
        num_received=tuple(map(len, from_each)),
        filled=(mine < 0).to(device),
    )


class _Move(torch.autograd.Function):
    """The exchange of tokens in dim 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, group: ProcessGroup) -> Tensor:
        ctx.plan, ctx.group, ctx.num_tokens = plan, group, x.shape[0]
        arrived = _exchanged(x.index_select(0, plan.sent), plan.num_sent, plan.num_received, group)
        result = x.new_zeros((len(plan.filled), *x.shape[1:]))
        return result.index_copy(0, plan.received, arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _MoveBack.apply(grads[0], ctx.plan, ctx.group, ctx.num_tokens), None, None  # type: ignore[no-untyped-call]


class _MoveBack(torch.autograd.Function):
    """Its mirror: sends cotangents back, and adds up those of a token that went to several places. The mirror of this is the move again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, plan: Plan, group: ProcessGroup, num_tokens: int) -> Tensor:
        ctx.plan, ctx.group = plan, group
        arrived = _exchanged(gradient.index_select(0, plan.received), plan.num_received, plan.num_sent, group)
        return gradient.new_zeros((num_tokens, *gradient.shape[1:])).index_add(0, plan.sent, arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Move.apply(grads[0], ctx.plan, ctx.group), None, None, None  # type: ignore[no-untyped-call]


def _exchanged(tokens: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    per_token = tokens[0].numel() if len(tokens) else int(torch.tensor(tokens.shape[1:]).prod())
    as_bytes = tokens.to(torch.uint8) if tokens.dtype == torch.bool else tokens
    flat = comm.exchange(
        as_bytes.contiguous().view(-1), [n * per_token for n in sent], [n * per_token for n in received], group
    )
    result = flat.view(sum(received), *tokens.shape[1:])
    return result.bool() if tokens.dtype == torch.bool else result


def moved(x: SequenceTensor, index: Tensor, key: Any, target: Storage | None = None, fill: float = 0) -> SequenceTensor:
    """Return a tensor of other tokens, or of the same in another order.

    Args:
        x: with the sequence in a dim of its own.
        index: of each token of the result its place in `x`, -1 for the fill; on the CPU, the same on all ranks.
        key: what the plan is known by in this step.
        target: which tokens of the result each rank has; None: as of `x`.
        fill: for -1.

    Shapes: (..., L, ...), (N,) -> (..., N, ...). Communicates: one all_to_all of the tokens that change their rank, one in the backward.
    """
    own = x.placement
    source, target = own.storage, target or own.storage
    key = (key, len(index), own.length, target)
    if key not in source.plans:
        source.plans[key] = plan_of(index, source, target, x.device)
    plan = source.plans[key]

    def take(local: Tensor) -> Tensor:
        result: Tensor = _Move.apply(local.movedim(own.dim, 0), plan, source.group)  # type: ignore[no-untyped-call]
        if fill:
            shape = (-1, *[1] * (result.dim() - 1))
            result = torch.where(plan.filled.view(shape), torch.full_like(result, fill), result)
        # Contiguous, as one device's: then a view of it is one.
        return result.movedim(0, own.dim).contiguous()

    # The fill stands among the numbers themselves, not among what they are made of.
    local = take(made(x.local)) if bool((index < 0).any()) else by_source(x.local, take)
    return SequenceTensor(local, replace(own, storage=target, length=len(index)))


def brought(x: SequenceTensor, storage: Storage) -> SequenceTensor:
    """Return a tensor as another storage has its tokens; as it is where these are more than it holds."""
    own = x.placement
    if own.storage is storage or own.length > storage.capacity:
        return x
    order = torch.arange(own.length)
    if own.outer * own.inner == 1:
        return moved(x, order, "brought", storage)
    if isinstance(x.local, DeferredTensor):
        return x  # what it is made of has no such dims
    alone = SequenceTensor(own.split(x.local), replace(own, dim=own.dim + 1, outer=1, inner=1, copied=None))
    local = moved(alone, order, "brought", storage).local.flatten(own.dim, own.dim + 2)
    return SequenceTensor(local, replace(own, storage=storage, copied=None))


def as_tokens(x: SequenceTensor) -> SequenceTensor:
    """Return a tensor whose dim is one sequence: of rows one after the other, of tokens and their features, or of blocks in another order.

    Each number of the dim is a token of a storage of its own, where it is. Nothing moves.
    """
    own = x.placement
    if own.outer * own.inner == 1 or isinstance(x.local, DeferredTensor):
        return x
    storage = counted_through(own.storage, own.outer, own.length, own.inner)
    return SequenceTensor(x.local, replace(own, storage=storage, length=own.shown, outer=1, inner=1))


def counted_through(storage: Storage, outer: int, length: int, inner: int) -> Storage:
    """Return what holds each number of a dim as a token: of `outer` sequences one after the other, of `inner` numbers for each of their tokens.

    Nothing moves: each is where its token is in `storage`.
    """
    key = ("as tokens", outer, length, inner)
    if key not in storage.plans:
        ahead, within = torch.arange(outer)[:, None, None], torch.arange(inner)
        behind = outer * length * inner  # padding lies behind all that is shown, each place once
        places = []
        for rank in range(storage.layout.size):
            token = storage.positions_of(rank)[None, :, None]
            shown = (ahead * length + token) * inner + within
            padding = behind + (ahead * (storage.capacity - length) + token - length) * inner + within
            places.append(torch.where(token < length, shown, padding).flatten())
        storage.plans[key] = storage.of_places(torch.stack(places))
    found: Storage = storage.plans[key]
    return found


def in_order(x: SequenceTensor) -> SequenceTensor:
    """Return a tensor whose tokens lie as the layout says, without more padding than it needs; it has a dim of its own for them."""
    own = x.placement
    if own.storage.block or own.storage.root is None:
        return x
    return brought(x, own.storage.root.fitting(own.length))
