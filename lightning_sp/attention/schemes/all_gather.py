"""The ring in one go: all keys and values that a rank's queries need come first, lie in the order of their positions, and are computed at once.

    hops       own block | block of r-1 | block of r-2 | ...           R blocks, each merged into the last; a hop hides behind a block
    at once    all keys that are needed | one block for each of the rank's chunks that meets no edge of a mask

What travels is what travels in hops, byte for byte: every rank sends each other one only what it needs, and gradients go straight home. All
of it is in memory at once: up to R - 1 local K and V more than in hops, and nothing hides behind a block. It pays where a block is short: fewer,
larger kernel calls, no merge of partials but at a mask's edges, one wait.

Communicates: as `lightning_sp.attention.schemes.ring`.
Source: the all-gather of K and V of Llama 3, arXiv:2407.21783, section 3.3.2; here what no query needs stays, and the gradients' way home is a
reduce-scatter by messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lightning_sp.attention.plan.intervals import Range
from lightning_sp.attention.schemes.query_heads import QueryHeads, SavedHeads, backward_of_parts
from lightning_sp.attention.schemes.ring import Ring
from lightning_sp.attention.schemes.transport import (
    HomewardGradients,
    Transport,
    abandon_on_error,
    pack,
    pack_into,
    packed_shape,
    unpack,
)
from lightning_sp.attention.spec.accumulator import accumulator_dtype
from lightning_sp.attention.spec.positions import ScorePositions, global_positions


def all_gather_forward(
    ring: Ring,
    kv: tuple[Tensor, Tensor],
    queries: Iterable[QueryHeads],
    finish: Callable[[Tensor, Tensor], None],
    saved_kv: Tensor | None = None,
) -> None:
    """Do what `ring_forward` does. Shapes: as there."""
    hops = ring.begin_forward(*kv, saved_kv)
    with abandon_on_error(hops):
        keys = unpack(_gather(ring, hops, *kv))
    positions = _positions(ring, kv[0])
    for part in queries:
        finish(*part.finished(part.forward(ring.all_gather.blocks, keys, None, positions)))


def all_gather_backward(
    ring: Ring, kv: tuple[Tensor, Tensor], queries: Iterable[SavedHeads], saved_kv: Tensor | None = None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return what `ring_backward` returns. Shapes: as there."""
    dq, dtype = list[Tensor](), kv[0].dtype
    hops = ring.begin_backward(*kv, saved_kv)
    with abandon_on_error(hops):
        keys = unpack(_gather(ring, hops, *kv))
        dk, dv = backward_of_parts(queries, ring.all_gather.blocks, keys, dq, _positions(ring, kv[0]))
        del keys
        dkv = kv[0].new_zeros(packed_shape(kv[0]), dtype=accumulator_dtype(dtype))
        for own, slot in ring.all_gather.parts[ring.rank]:
            dkv[slice(*own)] = pack(dk[:, :, slice(*slot)], dv[:, :, slice(*slot)])
        home = HomewardGradients(ring, hops, dkv)
        for hop in range(1, ring.size):
            slots = [slot for _, slot in ring.all_gather.parts[ring.source(hop)]]
            home.send(hop, (_columns(dk, slots), _columns(dv, slots)) if slots else None)
        home_dk, home_dv = home.finish()
    return [each.to(dtype) for each in dq], home_dk.to(dtype), home_dv.to(dtype)


def _gather(ring: Ring, hops: Transport, k: Tensor, v: Tensor) -> Tensor:
    """Return all keys and values that this rank's queries see, by position. Shapes: (B, K, S, D) twice -> (n, 2, B, K, D)."""
    flying = [hops.start_keys(hop) for hop in range(1, ring.size)]
    kv = k.new_empty(ring.all_gather.num_keys, *packed_shape(k)[1:])
    for own, slot in ring.all_gather.parts[ring.rank]:
        pack_into(kv[slice(*slot)], k[:, :, slice(*own)], v[:, :, slice(*own)])
    for hop, transfer in enumerate(flying, start=1):
        slots = [slot for _, slot in ring.all_gather.parts[ring.source(hop)]]
        arrived = transfer.wait().split_with_sizes([end - start for start, end in slots])
        for slot, part in zip(slots, arrived, strict=True):
            kv[slice(*slot)] = part
        transfer.release()
    return kv


def _positions(ring: Ring, k: Tensor) -> ScorePositions | None:
    """Return where the scores lie; None where the kernel does not ask."""
    if ring.heads is None:
        return None
    queries = global_positions(ring.plan.layout.ring_chunks(ring.plan.length, ring.rank), k.device)
    return ScorePositions((0, k.shape[0]), ring.heads, queries, global_positions(ring.all_gather.keys, k.device))


def _columns(tensor: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return the tokens of the ranges, one after the other. Shapes: (B, K, n, D) -> (B, K, m, D)."""
    parts = [tensor[:, :, slice(*each)] for each in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
