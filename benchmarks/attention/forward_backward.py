"""Attention alone, forward and backward: CPU-seconds, bytes sent and peak memory per rank, sharded against one process.

Run with ``OMP_NUM_THREADS=1 python -m benchmarks.attention.forward_backward`` (sizes: ``--help``).
CPU-seconds are summed over the ranks: on a machine
with fewer cores than ranks a wall says how busy the machine is, CPU-seconds say what sharding costs. The one process takes as many
threads as the machine has cores, so that both sides share caches and hyper-threads alike; each repeat runs every side once, and the median of
the ratios within a repeat is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.instruments.resident import peak_growth
from benchmarks.instruments.traffic import counted, ring_options
from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.layout import SequenceLayout, shard
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from lightning_sp.testing import RankPool

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _documents(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Hide most: documents of 1,024 tokens."""
    return query // 1024 == key // 1024


def _heads(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Hide no block whole: every other key, by heads in turn."""
    return (query + key + head) % 2 == 0


FUNCTIONS = {"documents": _documents, "heads": _heads}


@dataclass(frozen=True)
class Problem:
    """One attention: whole sizes, dtype by name so that it travels between processes."""

    length: int = 8192
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    dim: int = 64
    dtype: str = "float32"
    causal: bool = True
    window: int = 0
    function: str = ""
    stages: int = 1

    @property
    def mask(self) -> AttentionMask:
        """Return the mask: the last `window` tokens, where there is one, and a mask_mod that must be searched, likewise."""
        return AttentionMask(
            self.causal,
            window_size=(self.window - 1, None) if self.window else (None, None),
            mask_mod=FUNCTIONS[self.function] if self.function else None,
        )

    @property
    def pairs(self) -> int:
        """Return how many (query, key) pairs are not masked."""
        if not self.causal:
            return self.length**2
        width = min(self.window or self.length, self.length)
        return width * (width + 1) // 2 + (self.length - width) * width

    def inputs(self, layout: SequenceLayout, rank: int) -> list[Tensor]:
        """Return this rank's part of q, k, v and the gradient of out."""
        generator = torch.Generator().manual_seed(0)
        tensors = []
        for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads):
            # Token-major memory, as a projection leaves it.
            whole = torch.randn(self.batch, self.length, heads, self.dim, generator=generator)
            local = shard(whole, layout, rank, dim=1).to(getattr(torch, self.dtype))
            tensors.append(local.transpose(1, 2))
            del whole
        return tensors


_meshes: dict[tuple[int, int], SequenceMesh] = {}


# ulysses, ring, ring_transport, ring_method
Layout = tuple[int, int, str, str]


def step(problem: Problem, ulysses: int, ring: int, *ways: str) -> dict[str, float]:
    """Run one forward and backward on this rank and return what it cost. Every rank of the world calls it."""
    mesh = mesh_of(ulysses, ring)
    inputs = problem.inputs(mesh.layout, mesh.sequence_rank)
    return _cost(inputs, lambda q, k, v: _attend(problem, mesh, ways, q, k, v))


def peak(problem: Problem, ulysses: int, ring: int, *ways: str) -> float:
    """Return this rank's peak memory over one forward and backward, inputs included, in bytes."""
    mesh = mesh_of(ulysses, ring)
    inputs = problem.inputs(mesh.layout, mesh.sequence_rank)
    return _peak(inputs, lambda q, k, v: _attend(problem, mesh, ways, q, k, v))


def step_whole(problem: Problem, threads: int) -> dict[str, float]:
    """Run one process on whole sequences: `F.scaled_dot_product_attention`, what it does without this project; else our operator."""
    torch.set_num_threads(threads)
    return _cost(problem.inputs(SequenceLayout(), 0), lambda q, k, v: _attend_whole(problem, q, k, v))


def peak_whole(problem: Problem) -> float:
    """Return the peak memory of `F.scaled_dot_product_attention` on whole sequences, inputs included, in bytes."""
    return _peak(problem.inputs(SequenceLayout(), 0), lambda q, k, v: _attend_whole(problem, q, k, v))


def mesh_of(ulysses: int, ring: int) -> SequenceMesh:
    if (ulysses, ring) not in _meshes:
        base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=ulysses * ring)
        _meshes[ulysses, ring] = SequenceMesh.build(base, ring_size=ring, ulysses_size=ulysses)
    return _meshes[ulysses, ring]


def _attend(problem: Problem, mesh: SequenceMesh, ways: Sequence[str], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    transport, method = ways
    options = ring_options(transport, method)
    return sequence_parallel_attention(q, k, v, mesh=mesh, mask=problem.mask, ulysses_stages=problem.stages, **options)


def _attend_whole(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if problem.window or problem.function:
        # Torch's function would need an S x S mask.
        return sequence_parallel_attention(q, k, v, mesh=None, mask=problem.mask)
    enable_gqa = problem.kv_heads != problem.heads
    return F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=enable_gqa)


def _cost(inputs: list[Tensor], attend: Attend) -> dict[str, float]:
    *qkv, grad = inputs
    for tensor in qkv:
        tensor.requires_grad_(True)
    dist.barrier()
    with counted() as traffic:
        wall, cpu = time.perf_counter(), time.process_time()
        torch.autograd.backward(attend(*qkv), grad)
        cpu = time.process_time() - cpu
        dist.barrier()
        wall = time.perf_counter() - wall
    return {"cpu_s": cpu, "wall_s": wall, "sent_bytes": float(traffic.sent_bytes)}


def _peak(inputs: list[Tensor], attend: Attend) -> float:
    *qkv, grad = inputs
    for tensor in qkv:
        tensor.requires_grad_(True)
    held = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
    dist.barrier()
    with peak_growth() as growth:
        torch.autograd.backward(attend(*qkv), grad)
        dist.barrier()
    return float(held + growth.peak_bytes)


def compare(problem: Problem, layouts: list[Layout], repeats: int) -> list[dict[str, Any]]:
    """Return one row per layout; the sides of a repeat run one after the other, so that they meet the same machine."""
    threads = os.cpu_count() or 1
    with contextlib.ExitStack() as stack:
        pools = {
            size: stack.enter_context(RankPool(size)) for size in {1, *(layout[0] * layout[1] for layout in layouts)}
        }
        pools[1].run(step_whole, problem, threads)  # warm-up
        for layout in layouts:
            pools[layout[0] * layout[1]].run(step, problem, *layout)
        base: list[dict[str, float]] = []
        runs: dict[Layout, list[list[dict[str, float]]]] = {layout: [] for layout in layouts}
        for _ in range(repeats):
            base.append(pools[1].run(step_whole, problem, threads)[0])
            for layout in layouts:
                runs[layout].append(pools[layout[0] * layout[1]].run(step, problem, *layout))
        dense = replace(problem, window=0)
        causal = [pools[1].run(step_whole, dense, threads)[0] for _ in range(repeats if problem.window else 0)]
    rows = [_row("whole", [[each] for each in base], base)]
    if causal:
        # What the window would cost if each of its pairs cost as much as one of causal attention.
        share = problem.pairs / dense.pairs
        rows.append(_row("causal x pairs", [[{**each, "cpu_s": each["cpu_s"] * share}] for each in causal], base))
    rows += [_row(_name(layout), runs[layout], base) for layout in layouts]
    peaks = _peaks(problem, layouts)
    return [row | {"peak_mib": peaks.get(row["layout"], math.nan)} for row in rows]


def _name(layout: Layout) -> str:
    return "{}x{} {} {}".format(*layout) if layout[1] > 1 else "{}x{}".format(*layout[:2])


def _peaks(problem: Problem, layouts: list[Layout]) -> dict[str, float]:
    """Return the largest rank's peak per layout in MiB, from new processes: what earlier runs left in the allocator's free lists would count."""
    with RankPool(1) as pool:
        peaks = {"whole": max(pool.run(peak_whole, problem)) / 2**20}
    for layout in layouts:
        with RankPool(layout[0] * layout[1]) as pool:
            peaks[_name(layout)] = max(pool.run(peak, problem, *layout)) / 2**20
    return peaks


def _row(name: str, runs: list[list[dict[str, float]]], base: list[dict[str, float]]) -> dict[str, Any]:
    cpu = [sum(rank["cpu_s"] for rank in ranks) for ranks in runs]
    ratios = [mine / one["cpu_s"] for mine, one in zip(cpu, base, strict=True)]
    return {
        "layout": name,
        "cpu_s": statistics.median(cpu),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "wall_s": statistics.median(max(rank["wall_s"] for rank in ranks) for ranks in runs),
        "sent_mib": [round(rank["sent_bytes"] / 2**20, 2) for rank in runs[0]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in asdict(Problem()).items():
        if name != "causal":  # --full
            choices = ["", *FUNCTIONS] if name == "function" else None
            parser.add_argument(f"--{name}", type=type(default), default=default, choices=choices)
    parser.add_argument("--full", action="store_true", help="full instead of causal attention")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layouts", default="4x1,1x4,2x2", help="ulysses x ring, comma-separated")
    parser.add_argument(
        "--transport",
        default="auto",
        help="ring_transport, or network+saved, comma-separated: each layout with a ring runs with each",
    )
    parser.add_argument("--method", default="auto", help="ring_method, likewise")
    arguments = vars(parser.parse_args())
    ways, layouts = [arguments.pop(name).split(",") for name in ("transport", "method")], list[Layout]()
    for ulysses, ring in (map(int, name.split("x")) for name in arguments.pop("layouts").split(",")):
        layouts += [(ulysses, ring, *each) for each in (product(*ways) if ring > 1 else [("auto", "auto")])]
    repeats, full = arguments.pop("repeats"), arguments.pop("full")
    problem = Problem(causal=not full, **arguments)
    print(f"{problem}, torch {torch.__version__}, {repeats} repeats, load {os.getloadavg()[0]:.1f}")
    print(
        "| ulysses x ring | CPU-s | over one process (median, low..high) | wall s | MiB sent per rank | peak MiB per rank |"
    )
    print("|---|---|---|---|---|---|")
    for row in compare(problem, layouts, repeats):
        print(
            f"| {row['layout']} | {row['cpu_s']:.2f} | {100 * (row['ratio'] - 1):+.1f}% ({100 * (row['low'] - 1):+.1f}.."
            f"{100 * (row['high'] - 1):+.1f}%) | {row['wall_s']:.2f} | {row['sent_mib']} | {row['peak_mib']:.0f} |"
        )


if __name__ == "__main__":
    main()
