"""Packed documents over a ring: how unequal the ranks' work is with zigzag and with a balanced layout, and what finding one costs.

Run with ``OMP_NUM_THREADS=1 python -m benchmarks.attention.balance`` (sizes: ``--help``).
Documents are the running Python's own standard library,
one a file, as long as the file has bytes, shuffled and packed into rows that cut the last one. CPU-seconds are those of one forward and
backward on real ranks, of each rank the least of the repeats: what else the machine does only adds to them. ``--search`` times the search alone.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sysconfig
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.instruments.traffic import counted
from lightning_sp.attention import AttentionMask, boundaries_from_lengths, sequence_parallel_attention
from lightning_sp.attention.plan.balance import balance
from lightning_sp.layout import SequenceLayout, shard
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from lightning_sp.testing import RankPool

_meshes: dict[int, SequenceMesh] = {}


@cache
def standard_library() -> tuple[int, ...]:
    """Return the sizes of the standard library's files in bytes, in the order of their names."""
    sizes: list[int] = []
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "__pycache__"})
        sizes += [Path(folder, name).stat().st_size for name in sorted(files) if name.endswith(".py")]
    return tuple(size for size in sizes if size)


def packed(length: int, rows: int, seed: int, shorter: int = 1) -> list[list[int]]:
    """Return the lengths of the documents of each row: the corpus shuffled, its documents one after the other, cut where a row ends.

    Args:
        length: of a row, tokens.
        rows: how many.
        seed: of the order.
        shorter: each document has so many times fewer tokens.
    """
    corpus = [-(-size // shorter) for size in standard_library()]
    random.Random(seed).shuffle(corpus)
    found: list[list[int]] = [[]]
    for document in corpus * (1 + rows * length // sum(corpus)):
        while document and len(found) <= rows:
            taken = min(document, length - sum(found[-1]))
            found[-1].append(taken)
            document -= taken
            if sum(found[-1]) == length:
                found.append([])
    return found[:rows]


@dataclass(frozen=True)
class Problem:
    """One attention over packed documents: whole sizes."""

    length: int
    ring: int
    rows: int
    heads: int
    dim: int
    seed: int

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask(boundaries=boundaries_from_lengths(packed(self.length, self.rows, self.seed)))


def step(problem: Problem, layout: SequenceLayout) -> tuple[float, float]:
    """Return this rank's CPU-seconds of a forward and backward, and the bytes that it sends. Every rank calls it."""
    if problem.ring not in _meshes:
        base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=problem.ring)
        _meshes[problem.ring] = SequenceMesh.build(base, ring_size=problem.ring, ulysses_size=1)
    mesh = _meshes[problem.ring]
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for _ in range(4):
        whole = torch.randn(problem.rows, problem.length, problem.heads, problem.dim, generator=generator)
        tensors.append(shard(whole, layout, mesh.sequence_rank, dim=1).transpose(1, 2))
    *qkv, grad = tensors
    for tensor in qkv:
        tensor.requires_grad_(True)
    mask = problem.mask
    dist.barrier()
    with counted() as traffic:
        cpu = time.process_time()
        sequence_parallel_attention(*qkv, mesh=mesh, mask=mask, layout=layout).backward(grad)
        cpu = time.process_time() - cpu
    dist.barrier()
    return cpu, float(traffic.sent_bytes)


def compare(problem: Problem, repeats: int) -> None:
    """Print one row: zigzag and balanced, interleaved."""
    found = balance([problem.mask], SequenceLayout(problem.ring), problem.length)
    layouts = {"zigzag": SequenceLayout(problem.ring), "balanced": found.layout}
    cpu: dict[str, list[list[float]]] = {name: [] for name in layouts}
    sent: dict[str, float] = {}
    with RankPool(problem.ring) as pool:
        for repeat in range(repeats + 1):
            for name, layout in layouts.items():
                ranks = pool.run(step, problem, layout)
                sent[name] = sum(each[1] for each in ranks) / 2**20
                if repeat:  # the first warms up
                    cpu[name].append([each[0] for each in ranks])
    least = {name: [min(rank) for rank in zip(*runs, strict=True)] for name, runs in cpu.items()}
    excess = {name: 100 * (max(ranks) * problem.ring / sum(ranks) - 1) for name, ranks in least.items()}
    total = {name: sum(ranks) for name, ranks in least.items()}
    print(
        f"| {problem.length} | {problem.ring} | {problem.rows} | {problem.seed} | {100 * found.zigzag_imbalance:.1f}% -> "
        f"{100 * found.imbalance:.1f}% | {excess['zigzag']:.1f}% -> {excess['balanced']:.1f}% | {max(least['zigzag']):.2f} -> "
        f"{max(least['balanced']):.2f} | {total['zigzag']:.2f} -> {total['balanced']:.2f} | {sent['zigzag']:.1f} -> {sent['balanced']:.1f} |",
        flush=True,
    )


def search(length: int, ring: int, rows: int, seeds: int, shorter: int) -> None:
    """Print one row: the search's CPU-milliseconds and what it finds, over many packed batches."""
    cpu, found = [], []
    for seed in range(seeds):
        mask = AttentionMask(boundaries=boundaries_from_lengths(packed(length, rows, seed, shorter)))
        start = time.process_time()
        found.append(balance([mask], SequenceLayout(ring), length))
        cpu.append(1e3 * (time.process_time() - start))
    moved = sum(each.moved_tokens for each in found) / max(1, sum(each.zigzag_moved_tokens for each in found))
    before, after = (
        [100 * value for value in values]
        for values in zip(*[(e.zigzag_imbalance, e.imbalance) for e in found], strict=True)
    )
    print(
        f"| {length} | {ring} | {rows} | {statistics.mean(before):.1f}% (most {max(before):.1f}%) | {statistics.mean(after):.1f}% (most "
        f"{max(after):.1f}%) | {100 * (moved - 1):+.1f}% | {statistics.median(cpu):.1f} (most {max(cpu):.1f}) |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="32768")
    parser.add_argument("--rings", default="4")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--search", action="store_true", help="time the search alone, without ranks")
    parser.add_argument(
        "--shorter", type=int, default=1, help="with --search: how many times shorter the documents are"
    )
    options = parser.parse_args()
    print(f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}, {options}")
    if options.search:
        print(
            "| S | ring | rows | zigzag, pairs above the mean | balanced | keys moved | search, CPU-ms |\n|---|---|---|---|---|---|---|"
        )
    else:
        print(
            "| S | ring | rows | seed | busiest over mean, pairs | CPU-seconds | busiest rank's CPU-s | all ranks' CPU-s | MiB sent |"
            "\n|---|---|---|---|---|---|---|---|---|"
        )
    for length in map(int, options.lengths.split(",")):
        for ring in map(int, options.rings.split(",")):
            for rows in map(int, options.rows.split(",")):
                if options.search:
                    search(length, ring, rows, options.seeds, options.shorter)
                    continue
                for seed in range(options.seeds):
                    compare(Problem(length, ring, rows, options.heads, options.dim, seed), options.repeats)


if __name__ == "__main__":
    main()
