"""How much of what a ring sends hides behind the blocks: time in which a rank waits for a hop, with the blocks and without.

    python -m benchmarks.attention.overlap                                    2 ranks, 8,192 and 32,768 tokens
    python -m benchmarks.attention.overlap --world 4 --lengths 16384

Both passes send the same; in the second the kernel is left out, so that all of it has to be waited for. The hidden share is what of that waiting
the first does without. Of each hop the least wait of all ranks counts: who comes last waits for the message, who came early for the others too,
and the last gradients' way home stands by itself: nothing is left that it could hide behind. A pass: forward and backward, causal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.instruments.traffic import ring_options
from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.attention.schemes import query_heads
from lightning_sp.attention.schemes.cpu_shared_memory import Arrival
from lightning_sp.comm.point_to_point import Transfer
from lightning_sp.layout import shard
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from lightning_sp.testing import RankPool

_meshes: list[SequenceMesh] = []


@contextmanager
def waiting() -> Iterator[list[float]]:
    """Collect the seconds of each wait for a hop."""
    waits: list[float] = []

    def timed(original: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def wait(self: Any) -> Tensor:
            began = time.perf_counter()
            arrived = original(self)
            waits.append(time.perf_counter() - began)
            return arrived

        return wait

    with (
        mock.patch.object(Transfer, "wait", timed(Transfer.wait)),
        mock.patch.object(Arrival, "wait", timed(Arrival.wait)),
    ):
        yield waits


@contextmanager
def without_blocks() -> Iterator[None]:
    """Leave the kernel and the merges out."""

    def forward_step(kernel: Any, blocks: Any, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    def backward_step(
        kernel: Any, blocks: Any, saved: Sequence[Tensor], kv: Sequence[Tensor], *rest: Any
    ) -> tuple[Tensor, ...]:
        return torch.zeros_like(saved[1]), torch.zeros_like(kv[0]), torch.zeros_like(kv[1])

    with (
        mock.patch.object(query_heads, "forward_step", forward_step),
        mock.patch.object(query_heads, "backward_step", backward_step),
    ):
        yield


def measure(length: int, transport: str) -> tuple[float, list[float], list[float]]:
    """Return this rank's (seconds of a pass, waits for its hops in order, and those without blocks)."""
    if not _meshes:
        size = dist.get_world_size()
        base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=size)
        _meshes.append(SequenceMesh.build(base, ring_size=size, ulysses_size=1))
    (mesh,) = _meshes
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, length, 8, 64, generator=generator) for _ in range(4)]
    q, k, v, grad = (shard(t, mesh.layout, mesh.sequence_rank, dim=1).transpose(1, 2) for t in whole)
    del whole

    def run() -> tuple[float, list[float]]:
        leaves = [t.detach().requires_grad_(True) for t in (q, k, v)]
        dist.barrier()
        with waiting() as waits:
            began = time.perf_counter()
            ways = ring_options(transport, "hops")
            sequence_parallel_attention(*leaves, mesh=mesh, mask=AttentionMask(), **ways).backward(grad)
            return time.perf_counter() - began, waits

    wall, waited = run()
    with without_blocks():
        _, alone = run()
    return wall, waited, alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(
        f"{arguments.world} ranks, H 8, D 64, float32, causal, {arguments.repeats} repeats, load {os.getloadavg()[0]:.1f}\n"
    )
    print(
        "| S | transport | a pass, s | waits for hops, ms | without blocks, ms | hidden | the last way home, ms | of the pass |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with RankPool(arguments.world, timeout_s=600) as pool:
        for length in arguments.lengths:
            for transport in ("network", "network+saved", "shared_memory"):
                pool.run(measure, length, transport)
                runs = [pool.run(measure, length, transport) for _ in range(arguments.repeats)]
                wall = statistics.median(max(rank[0] for rank in ranks) for ranks in runs)
                waited, alone = (_least([[rank[i] for rank in ranks] for ranks in runs]) for i in (1, 2))
                travels = transport != "shared_memory"
                hidden = f"{100 * (1 - sum(waited[:-1]) / sum(alone[:-1])):.1f}%" if travels else "nothing travels"
                print(
                    f"| {length:,} | {transport} | {wall:.2f} | {1e3 * sum(waited[:-1]):.1f} | {1e3 * sum(alone[:-1]):.1f} | {hidden} | "
                    f"{1e3 * waited[-1]:.1f} | {100 * waited[-1] / wall:.1f}% |",
                    flush=True,
                )


def _least(runs: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return for each hop the median over the repeats of the least wait of all ranks."""
    least = [[min(hop) for hop in zip(*ranks, strict=True)] for ranks in runs]
    return [statistics.median(hop) for hop in zip(*least, strict=True)]


if __name__ == "__main__":
    main()
