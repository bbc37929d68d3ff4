"""The blocks of a step in one kernel call for each kind, where a kernel takes sequences of many lengths packed one after the other.

    blocks of a step      documents, windows' tiles, rows of the batch: each a range of queries and one of keys
    one call              | q of block 1 | q of block 2 | ...      | k of block 1 | k of block 2 | ...      and where each begins

A query is in at most one block of a call, so no partial of a call meets another; those of two calls are merged: of two kinds, or of two runs of
keys that a query sees. Anticausal blocks are read backwards, each by itself. Tokens are picked by an index, made once for a step of a plan.

B batch, H query heads, K key-value heads, S local queries, n keys that travelled, D head dim; T, U: queries and keys of all blocks of a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_sp.attention.plan.blocks import Block, Kind
from lightning_sp.attention.plan.intervals import Range
from lightning_sp.attention.spec.accumulator import accumulator_dtype
from lightning_sp.devices import copies_on


@dataclass(frozen=True)
class Segments:
    """Where the sequences of a call begin and end.

    Args:
        queries: first query of each, and the end of the last: (blocks + 1,), int32.
        keys: likewise.
        max_queries: of one sequence.
        max_keys: of one sequence.
    """

    queries: Tensor
    keys: Tensor
    max_queries: int
    max_keys: int


@runtime_checkable
class PackedKernel(Protocol):
    """What a kernel that takes many lengths offers besides."""

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse); shapes q (T, H, D), k and v (U, K, D) -> (T, H, D), (H, T)."""
        ...

    def backward_packed(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, *,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) from the global out and lse."""
        ...


@dataclass(frozen=True)
class Call:
    """One kernel call: the blocks of a kind.

    Args:
        causal: whether each query sees the keys up to its own position in its sequence.
        rows: of the batch, of each query, (T,), int64.
        queries: local, of each, (T,).
        key_rows: of each key, (U,).
        keys: (U,).
        segments: where the blocks begin.
    """

    causal: bool
    rows: Tensor
    queries: Tensor
    key_rows: Tensor
    keys: Tensor
    segments: Segments

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that goes to the device."""
        return self.rows, self.queries, self.key_rows, self.keys, self.segments.queries, self.segments.keys

    def with_tensors(self, tensors: Iterator[Tensor]) -> Call:
        """Return the same with the next ones, in the order of `tensors`."""
        rows, queries, key_rows, keys, q_starts, k_starts = islice(tensors, 6)
        segments = replace(self.segments, queries=q_starts, keys=k_starts)
        return replace(self, rows=rows, queries=queries, key_rows=key_rows, keys=keys, segments=segments)


def forward_calls(
    kernel: PackedKernel,
    scale: float,
    head_groups: Sequence[tuple[Range, Range]],
    calls: Sequence[Call],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Iterator[tuple[tuple[Tensor, slice, Tensor], Tensor, Tensor]]:
    """Yield the partials of the calls: (index of the queries in (B, H, S), out, lse).

    Shapes: q (B, H, S, D), k and v (B, K, n, D) -> (T, H, D), (T, H) each.
    """
    for call in calls:
        here, there = (call.rows, slice(None), call.queries), (call.key_rows, slice(None), call.keys)
        queries, keys, values = q[here], k[there], v[there]
        out = queries.new_empty(queries.shape)
        lse = queries.new_empty(queries.shape[:2], dtype=accumulator_dtype(q.dtype))
        for heads, kv in head_groups:
            own, shared = slice(*heads), slice(*kv)
            part, part_lse = kernel.forward_packed(
                queries[:, own], keys[:, shared], values[:, shared], call.segments, causal=call.causal, scale=scale
            )
            out[:, own], lse[:, own] = part, part_lse.transpose(0, 1)
        yield here, out, lse


def backward_calls(
    kernel: PackedKernel,
    scale: float,
    head_groups: Sequence[tuple[Range, Range]],
    calls: Sequence[Call],
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    kv: tuple[Tensor, Tensor],
    dq: Tensor,
) -> tuple[Tensor, Tensor]:
    """Add to dq in place what the calls give, and return (dk, dv) in the accumulator's dtype.

    Shapes: saved: gradient of out, q, out (B, H, S, D), lse (B, H, S); kv (B, K, n, D) twice; dq as q.
    """
    k, v = kv
    dk, dv = (torch.zeros_like(t, dtype=accumulator_dtype(t.dtype)) for t in kv)
    for call in calls:
        here, there = (call.rows, slice(None), call.queries), (call.key_rows, slice(None), call.keys)
        grad, queries, out, lse = (t[here] for t in saved)
        keys, values = k[there], v[there]
        dq_part = torch.empty_like(queries)
        dk_part, dv_part = (torch.zeros_like(t, dtype=dk.dtype) for t in (keys, values))
        for heads, shared_heads in head_groups:
            own, shared = slice(*heads), slice(*shared_heads)
            dq_heads, dk_heads, dv_heads = kernel.backward_packed(
                grad[:, own], queries[:, own], keys[:, shared], values[:, shared], out[:, own],
                lse[:, own].transpose(0, 1), call.segments, causal=call.causal, scale=scale,
            )  # fmt: skip
            dq_part[:, own] = dq_heads
            # Neighbouring groups may share a key-value head: their gradients add.
            dk_part[:, shared] += dk_heads
            dv_part[:, shared] += dv_heads
        dq[here] += dq_part
        for whole, part in ((dk, dk_part), (dv, dv_part)):
            # A key may be in several blocks of a window.
            whole.transpose(1, 2).index_put_((call.key_rows, call.keys), part, accumulate=True)
    return dk, dv


@lru_cache(maxsize=32)  # four indices of the step's tokens each, on the device
def calls_of(blocks: tuple[Block, ...], batch: int, device: torch.device) -> tuple[Call, ...]:
    """Return the calls that compute the blocks of a step; blocks without a row are those of all rows."""
    calls = [
        _call(each, kind, batch)
        for kind in Kind
        for each in _without_repeats(block for block in blocks if block.kind is kind)
    ]
    tensors = iter(copies_on([tensor for each in calls for tensor in each.tensors], device))
    return tuple(each.with_tensors(tensors) for each in calls)


def _without_repeats(blocks: Iterable[Block]) -> list[list[Block]]:
    """Return the blocks in lists none of which has a query of a row twice; a run's blocks come in the order of their queries."""
    found: list[list[Block]] = []
    ends: list[dict[int | None, int]] = []
    for block in blocks:
        number = next((n for n, end in enumerate(ends) if end.get(block.row, 0) <= block.queries[0]), len(found))
        if number == len(found):
            found.append([])
            ends.append({})
        found[number].append(block)
        ends[number][block.row] = block.queries[1]
    return found


def _call(blocks: Sequence[Block], kind: Kind, batch: int) -> Call:
    ranges_of_rows = list(_ranges_of_rows(blocks, batch))
    rows_of = torch.tensor([row for row, _, _ in ranges_of_rows])
    backwards = kind is Kind.ANTICAUSAL
    indices = []
    for ranges in ([queries for _, queries, _ in ranges_of_rows], [keys for _, _, keys in ranges_of_rows]):
        lengths = torch.tensor([end - start for start, end in ranges])
        rows = rows_of.repeat_interleave(lengths)
        runs = [torch.arange(start, end) for start, end in ranges]
        tokens = torch.cat([run.flip(0) for run in runs] if backwards else runs)
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
        indices.append((rows, tokens, starts, int(lengths.max())))
    (rows, queries, q_starts, most_q), (key_rows, keys, k_starts, most_k) = indices
    numbers = rows * (int(queries.max()) + 1) + queries
    assert bool((numbers.sort().values.diff() > 0).all()), "a query in two blocks of a kind"
    segments = Segments(q_starts, k_starts, most_q, most_k)
    return Call(kind is not Kind.FULL, rows, queries, key_rows, keys, segments)


def _ranges_of_rows(blocks: Sequence[Block], batch: int) -> Iterator[tuple[int, Range, Range]]:
    for block in blocks:
        for row in range(batch) if block.row is None else (block.row,):
            yield row, block.queries, block.keys
