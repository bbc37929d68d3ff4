"""What a rank sends: counted, by wrapping `torch.distributed`'s functions, and by formula. Bytes to oneself do not count."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from lightning_sp.attention.schemes.head_split import HeadSplit
from lightning_sp.config import AttentionKeywords

# Collectives that the attention has no business with; torch 2.13 has new names for two of them.
OTHERS = tuple(
    name
    for name in (
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all"),
        *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    )
    if hasattr(dist, name)
)


@dataclass
class Traffic:
    """What left this rank, and how often each function was called."""

    sent_bytes: int = 0
    calls: Counter[str] = field(default_factory=Counter)


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count this rank's all-to-alls and point-to-point messages in the block; other collectives show in `calls` alone."""
    traffic = Traffic()
    all_to_all, batch = dist.all_to_all_single, dist.batch_isend_irecv

    def all_to_all_single(
        output: Tensor, sent: Tensor, output_split: Any = None, input_split: Any = None, group: Any = None, **rest: Any
    ) -> Any:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        splits = input_split or [sent.shape[0] // size] * size
        row_bytes = sent[0].numel() * sent.element_size() if sent.numel() else 0
        traffic.sent_bytes += (sum(splits) - splits[rank]) * row_bytes
        traffic.calls["all_to_all_single"] += 1
        return all_to_all(output, sent, output_split, input_split, group=group, **rest)

    def batch_isend_irecv(operations: list[dist.P2POp]) -> Any:
        for operation in operations:
            sends = operation.op is dist.isend
            traffic.calls["isend" if sends else "irecv"] += 1
            if sends:
                traffic.sent_bytes += operation.tensor.numel() * operation.tensor.element_size()
        return batch(operations)

    def other(name: str) -> Any:
        function = getattr(dist, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            traffic.calls[name] += 1
            return function(*arguments, **keywords)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "all_to_all_single", all_to_all_single))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", batch_isend_irecv))
        for name in OTHERS:
            stack.enter_context(mock.patch.object(dist, name, other(name)))
        yield traffic


def ulysses_sent_elements(
    split: HeadSplit, rank: int, *, batch: int, tokens: int, dim: int, delta: int = 1
) -> tuple[int, int]:
    """Return what a Ulysses rank sends in a forward and in a backward, in elements; `tokens` are its own, before the exchange.

    The formula of the docstring of `lightning_sp.attention.schemes.ulysses`. `delta`: elements that one delta takes, 2 in 16 bits.
    """
    h = [end - start for start, end in map(split.queries, range(split.size))]
    k = [end - start for start, end in map(split.keys, range(split.size))]
    others = [u for u in range(split.size) if u != rank]
    qkv = sum(h[u] + 2 * k[u] for u in others)
    out = (split.size - 1) * h[rank]
    out_grad = sum(h[u] for u in others)
    qkv_grad = (split.size - 1) * (h[rank] + 2 * k[rank])
    return batch * tokens * dim * (qkv + out), batch * tokens * (dim * (out_grad + qkv_grad) + delta * out_grad)


def recomputed_sent_elements(
    heads: int,
    kv_heads: int,
    size: int,
    stages: int,
    rank: int,
    *,
    batch: int,
    tokens: int,
    dim: int,
    delta: int = 1,
    runs: int = 1,
) -> int:
    """Return what a Ulysses rank sends for an attention in stages that are projected again, forward and backward, in elements.

    The formula of docs/memory.md. `runs`: forwards of it, 2 where a block is recomputed with its attention.
    """  # fmt: skip
    split = HeadSplit(heads // stages, kv_heads // stages, size)
    forward, backward = ulysses_sent_elements(split, rank, batch=batch, tokens=tokens, dim=dim, delta=delta)
    others = [u for u in range(size) if u != rank]
    again = sum(sum(end - start for start, end in (split.queries(u), *(split.keys(u),) * 2)) for u in others)
    return stages * (runs * forward + backward + batch * tokens * dim * again)


def ring_options(transport: str, method: str = "auto") -> AttentionKeywords:
    """Return the options of a ring by a transport; with "+saved" behind its name, arriving keys and values are saved for the backward."""
    name, _, saved = transport.partition("+")
    return {"ring_transport": name, "ring_saves_kv": saved == "saved", "ring_method": method}


def ring_sent_units(size: int, rank: int, *, causal: bool, saves_kv: bool = False) -> tuple[int, int]:
    """Return what a ring rank sends in a forward and in a backward, in units of its local K (or V), for one document.

    The formula of the docstring of `lightning_sp.attention.schemes.ring`; `saves_kv`: with `ring_saves_kv`.
    """
    keys, home = (size - 1 + rank, 2 * (size - 1) - rank) if causal else (2 * (size - 1), 2 * (size - 1))
    return keys, home if saves_kv else keys + home


def fewest_sent_bytes(
    scheme: tuple[int, int, bool], problem: dict[str, int], itemsize: int, *, shared: bool = False
) -> float:
    """Return the fewest bytes that a rank sends on average in a causal forward and backward, by the formulas above.

    Args:
        scheme: Ulysses ranks, ring ranks, and whether the ring's tokens lie in zigzag order. Where each rank holds consecutive ones, keys go to
            the later ranks alone: R-1 units on average, those again, and R-1 units of gradients home. It sends less, and has uneven work.
        problem: length, heads, kv_heads, dim; of one sample.
        itemsize: bytes of an element.
        shared: the ring's keys are read where they lie, and none is sent.
    """
    ulysses, ring, zigzag = scheme
    split = HeadSplit(problem["heads"], problem["kv_heads"], ulysses)
    dim, tokens = problem["dim"], problem["length"] // (ulysses * ring)
    sent = 0.0
    for rank in range(ulysses):
        first, last = split.keys(rank)
        unit = (last - first) * tokens * ulysses * dim
        sent += ring * sum(ulysses_sent_elements(split, rank, batch=1, tokens=tokens, dim=dim, delta=0))
        sent += (
            0
            if shared
            else unit
            * sum(sum(ring_sent_units(ring, r, causal=True)) if zigzag else 3 * (ring - 1) for r in range(ring))
        )
    return sent * itemsize / (ulysses * ring)
