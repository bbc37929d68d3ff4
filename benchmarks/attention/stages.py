"""Ulysses in stages of heads against unstaged, pair by pair: CPU-seconds, and peak memory beyond the inputs.

Run with ``OMP_NUM_THREADS=1 python -m benchmarks.attention.stages``.
The sides of a pair run one after the other on the same ranks, in turn which first.
CPU-seconds are of a forward and backward, summed over the ranks. Peaks are the largest rank's, of a forward alone and of a whole step, in new
processes. On CPU ranks the exchange is work like any other: that it is under way behind a kernel saves nothing there.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.attention.forward_backward import Problem, mesh_of, step
from benchmarks.before_after import interval
from benchmarks.instruments.resident import peak_growth
from lightning_sp.attention import sequence_parallel_attention
from lightning_sp.testing import RankPool

# ulysses, ring, query heads, key-value heads, stages
CASES = [
    *((4, 1, 8, 8, 2), (2, 1, 8, 8, 2), (2, 1, 8, 8, 4), (2, 1, 8, 2, 2), (2, 1, 8, 2, 4)),
    *((2, 2, 8, 8, 2), (2, 2, 8, 2, 4)),
]


def peaks(problem: Problem, ulysses: int, ring: int) -> tuple[int, int]:
    """Return by how much this rank's memory rises over a forward without gradients, and over a forward and backward: the least of three each."""
    mesh = mesh_of(ulysses, ring)
    *qkv, grad = problem.inputs(mesh.layout, mesh.sequence_rank)
    found: list[int] = []
    for backward in (False, True):
        rises = []
        for _ in range(4):  # the first makes libraries resident
            leaves = [tensor.detach().requires_grad_(backward) for tensor in qkv]
            dist.barrier()
            with peak_growth() as growth:
                out = sequence_parallel_attention(*leaves, mesh=mesh, mask=problem.mask, ulysses_stages=problem.stages)
                if backward:
                    out.backward(grad)
                dist.barrier()
            rises.append(growth.peak_bytes)
            del out, leaves
        found.append(min(rises[1:]))
    return found[0], found[1]


def compare(problem: Problem, ulysses: int, ring: int, pairs: int) -> str:
    """Return the row of a case."""
    whole, layout = replace(problem, stages=1), (ulysses, ring, "auto", "auto")
    seconds: list[list[float]] = [[], []]
    with RankPool(ulysses * ring, timeout_s=600) as pool:
        for pair in range(-1, pairs):  # the first is not counted
            for side in (0, 1) if pair % 2 == 0 else (1, 0):
                spent = sum(rank["cpu_s"] for rank in pool.run(step, (whole, problem)[side], *layout))
                seconds[side] += [spent] if pair >= 0 else []
    ratios = sorted(staged / unstaged for unstaged, staged in zip(*seconds, strict=True))
    (low, high), median = interval(ratios), statistics.median(ratios)
    verdict = "the same" if abs(median - 1) <= 0.03 or low <= 1 <= high else "DIFFERENT"
    rises = []
    for each in (whole, problem):
        with RankPool(ulysses * ring, timeout_s=600) as pool:
            of_ranks = pool.run(peaks, each, ulysses, ring)
        rises.append([max(rank[i] for rank in of_ranks) / 2**20 for i in (0, 1)])
    memory = [f"{before:.1f} -> {after:.1f}" for before, after in zip(*rises, strict=True)]
    name = f"{ulysses}x{ring} {problem.heads}/{problem.kv_heads}"
    cpu = f"{statistics.median(seconds[0]):.2f} | {median:.3f} ({low:.3f}..{high:.3f})"
    return f"| {name} | {problem.stages} | {cpu} | {verdict} | {' | '.join(memory)} |"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("words", nargs="*", help='cases as "2x1"; none: every case')
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {arguments.length} tokens, D {arguments.dim}, load {os.getloadavg()[0]:.1f}")
    columns = ["ulysses x ring, heads", "stages", "CPU-s unstaged", f"staged / unstaged, {arguments.pairs} pairs (95%)"]
    columns += ["verdict", "forward, MiB", "step, MiB"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for ulysses, ring, heads, kv_heads, stages in CASES:
        if not arguments.words or f"{ulysses}x{ring}" in arguments.words:
            sizes = dict(heads=heads, kv_heads=kv_heads, stages=stages)
            problem = Problem(length=arguments.length, dim=arguments.dim, **sizes)
            print(compare(problem, ulysses, ring, arguments.pairs), flush=True)


if __name__ == "__main__":
    main()
