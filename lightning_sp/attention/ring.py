"""Ring attention: keys and values come to the queries, hop by hop, while the previous block is computed.

In hop i every rank receives straight from the rank i before it only the keys that its mask needs, and sends likewise; nothing is passed
through, so nothing stale can be used and zigzag's unneeded halves never travel. The backward repeats the hops and sends each partial
(dk, dv) straight home.

    rank r:   own block | block of r-1 | block of r-2 | ...
                hop 1 ->|   hop 2   -> |                      hop i+1 is in flight while block i is computed

Communicates, sent by ring rank r of R, in units of its local K (or V, of equal size), for one document:

    causal:  forward R-1 + r (K and V: both chunks to the r earlier ranks, the early chunk alone to the R-1-r later ones),
             backward that again, and dK, dV home 2(R-1) - r; together 4(R-1) + r, on average over r 4.5(R-1)
    full:    forward 2(R-1), backward 4(R-1)

Windows, chunks and packed documents send less: only the ranges of keys that some query of the receiver may see.
Source: Ring Attention, arXiv:2310.01889; zigzag as in zhuzilin/ring-flash-attention; direct hops are this project's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp.attention.block import BlockKernel, backward_step, forward_step
from lightning_sp.attention.intervals import Range
from lightning_sp.attention.merge import accumulator_dtype
from lightning_sp.attention.places import Places, positions_of
from lightning_sp.attention.plan import Block, Plan, key_ranges, renumbered
from lightning_sp.attention.sinks import add_sinks
from lightning_sp.comm import Transfer


@dataclass(frozen=True)
class Ring:
    """One rank's view of the ring for one sequence: who holds what, and what travels."""

    plan: Plan
    rank: int
    group: ProcessGroup | None
    heads: Range | None = None  # query heads of this rank, where the kernel is to know where a score lies

    @property
    def size(self) -> int:
        """Return the ranks of the ring."""
        return self.plan.layout.ring_size

    @property
    def own(self) -> tuple[Block, ...]:
        """Return the blocks of this rank's queries against its own keys."""
        return self.plan.blocks(self.rank, self.rank)

    def source(self, hop: int) -> int:
        """Return the rank whose keys arrive in a hop."""
        return (self.rank - hop) % self.size

    def target(self, hop: int) -> int:
        """Return the rank to which this rank's keys go in a hop."""
        return (self.rank + hop) % self.size

    def places(self, q: Tensor, hop: int) -> Places | None:
        """Return where the scores of a hop lie, keys numbered as they arrive; None where the kernel does not ask."""
        if self.heads is None:
            return None
        layout, source = self.plan.layout, self.source(hop)
        queries = positions_of(layout.ring_chunks(self.plan.length, self.rank), q.device)
        held = self.arriving(hop)[0] if hop else None
        keys = positions_of(layout.ring_chunks(self.plan.key_length, source), q.device, held)
        return Places((0, q.shape[0]), self.heads, queries, keys)

    def arriving(self, hop: int) -> tuple[list[Range], list[Block]]:
        """Return the ranges of the source's keys that arrive in a hop, and the blocks on them as they lie then."""
        blocks = self.plan.blocks(self.rank, self.source(hop))
        ranges = key_ranges(blocks)
        return ranges, renumbered(blocks, ranges)

    def leaving(self, hop: int) -> list[Range]:
        """Return the ranges of this rank's keys that the target needs in a hop."""
        return key_ranges(self.plan.blocks(self.target(hop), self.rank))

    def start_keys(self, kv: Tensor, hop: int) -> Transfer:
        """Start the hop that brings `source(hop)`'s needed keys. Shapes: kv (S, 2, B, K, D), contiguous, token-major."""
        assert self.group is not None
        received = kv.new_empty(_length(self.arriving(hop)[0]), *kv.shape[1:])
        return Transfer(_taken(kv, self.leaving(hop)), self.target(hop), received, self.source(hop), self.group)


def ring_forward(
    ring: Ring, kernel: BlockKernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the local queries against the keys of all ring ranks, and the sinks.

    Shapes: q (B, H, S, D), k and v (B, K, S, D), sinks (H,) -> (B, H, S, D), (B, H, S); S = this ring rank's tokens.
    """
    size = ring.size
    hop_kv = _pack(k, v) if size > 1 else None
    running = None
    transfer: Transfer | None = None
    for hop in range(size):
        following = ring.start_keys(hop_kv, hop + 1) if hop_kv is not None and hop + 1 < size else None
        if hop == 0:
            running = forward_step(kernel, ring.own, q, k, v, None, ring.places(q, 0))
        elif transfer is not None:
            keys, values = _unpack(transfer.wait())
            running = forward_step(kernel, ring.arriving(hop)[1], q, keys, values, running, ring.places(q, hop))
        transfer = following
    assert running is not None
    out, lse = running if sinks is None else add_sinks(*running, sinks)
    return out.to(q.dtype), lse


def ring_backward(
    ring: Ring, kernel: BlockKernel, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) of the local tokens, from the global (out, lse) of the local queries.

    Shapes: as in `ring_forward`.
    """
    size = ring.size
    saved = (grad, q, out, lse)
    dq, dk, dv = backward_step(kernel, ring.own, saved, (k, v), None, ring.places(q, 0))
    if size == 1:
        return dq.to(q.dtype), dk, dv
    dkv = _pack(dk, dv).to(accumulator_dtype(k.dtype))
    del dk, dv  # what is dead goes before the next buffer comes: the peak of a ring is its buffers
    hop_kv = _pack(k, v)
    transfer: Transfer | None = ring.start_keys(hop_kv, 1)
    homeward: tuple[Transfer, list[Range]] | None = None
    for hop in range(1, size):
        assert transfer is not None
        received = transfer.wait()
        transfer = ring.start_keys(hop_kv, hop + 1) if hop + 1 < size else None
        dq, partial = _hop_backward(kernel, ring.arriving(hop)[1], saved, received, dq, ring.places(q, hop))
        del received
        _add_home(dkv, homeward)
        homeward = _send_home(ring, hop, partial, hop_kv)
        del partial
    _add_home(dkv, homeward)
    home_dk, home_dv = _unpack(dkv)
    return dq.to(q.dtype), home_dk.to(k.dtype), home_dv.to(v.dtype)


def _hop_backward(
    kernel: BlockKernel,
    blocks: Sequence[Block],
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    received: Tensor,
    dq: Tensor,
    places: Places | None,
) -> tuple[Tensor, Tensor]:
    """Return dq with the hop's part added, and the packed (dk, dv) of the keys received; empty where no query saw them."""
    if not blocks:
        return dq, received.new_empty(0)
    dq, dk, dv = backward_step(kernel, blocks, saved, _unpack(received), dq, places)
    return dq, _pack(dk, dv)


def _send_home(ring: Ring, hop: int, partial: Tensor, like: Tensor) -> tuple[Transfer, list[Range]]:
    """Start sending a partial (dk, dv) to the keys' owner, and receiving this rank's from the rank that used its keys."""
    assert ring.group is not None
    ranges = ring.leaving(hop)
    received = like.new_empty(_length(ranges), *like.shape[1:])
    return Transfer(partial, ring.source(hop), received, ring.target(hop), ring.group), ranges


def _add_home(dkv: Tensor, homeward: tuple[Transfer, list[Range]] | None) -> None:
    if homeward is None:
        return
    transfer, ranges = homeward
    received = transfer.wait()
    for (start, end), part in zip(
        ranges, received.split_with_sizes([end - start for start, end in ranges]), strict=True
    ):
        dkv[start:end] += part


def _taken(kv: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return the tokens of the ranges, one after the other: a view where there is one range."""
    if len(ranges) == 1:
        return kv[slice(*ranges[0])]
    return torch.cat([kv[slice(*held)] for held in ranges]) if ranges else kv[:0]


def _length(ranges: Sequence[Range]) -> int:
    return sum(end - start for start, end in ranges)


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Token-major, so that any range of tokens is one contiguous message. Shapes: (B, K, S, D) twice -> (S, 2, B, K, D)."""
    packed = k.new_empty(k.shape[2], 2, k.shape[0], k.shape[1], k.shape[3])
    packed[:, 0] = k.permute(2, 0, 1, 3)
    packed[:, 1] = v.permute(2, 0, 1, 3)
    return packed


def _unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Views. Shapes: (S, 2, B, K, D) -> (B, K, S, D) twice."""
    k, v = packed.unbind(1)
    return k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
