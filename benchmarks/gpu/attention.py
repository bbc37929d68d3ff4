"""Attention on one device: FLOP/s of the block kernel beside the device's own matrix product, and what a ring adds to it.

    python -m benchmarks.gpu.attention --json attention_gpu.json           on a GPU: bfloat16, 8K to 512K tokens, three head shapes
    OMP_NUM_THREADS=1 python -m benchmarks.gpu.attention --device cpu --lengths 256 --shapes 4/2/32 --matmul 256       anywhere

All ranks of a ring take turns on the one device: each runs the production `forward_step` and `backward_step` over the blocks of its plan, hop
by hop, and keys that would have travelled are sliced from the whole before the clock starts. What is measured is what a rank computes, its
merges and the sums of the gradients that come home included; what is left out is packing and transport; the bandwidth that hides it is printed.

FLOPs are of computed (query, key) pairs: 4 D a pair and head forward (q k^T, p v), 10 D backward (q k^T again, dv, dp, dq, dk). CUDA is timed by
events, a CPU by its CPU-seconds; after warm-up, the median and the range of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sp.attention import AttentionMask
from lightning_sp.attention.kernels.merge import (
    BlockKernel,
    HeadGroup,
    backward_step,
    empty_token_major,
    forward_step,
    merge_into,
)
from lightning_sp.attention.kernels.select import select_kernel
from lightning_sp.attention.plan.blocks import Block, Kind, plan_of
from lightning_sp.attention.schemes.ring import Ring
from lightning_sp.attention.spec.accumulator import accumulator_dtype
from lightning_sp.attention.spec.scores import Scores
from lightning_sp.config import AttentionOptions
from lightning_sp.layout import SequenceLayout, merge, shard

FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10  # a pair, head and head dim
# Llama-3-8B; its heads on one of four Ulysses ranks; a small model without GQA.
SHAPES = ("32/8/128", "8/2/128", "8/8/64")
LENGTHS = tuple(2**n for n in range(13, 20))


@dataclass(frozen=True)
class Case:
    """One attention of one sample: its heads, tokens, and on what it runs; `shape` is H/K/D."""

    shape: str
    length: int
    dtype: str
    device: str
    kernel: str = "auto"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return query heads, key-value heads, head dim."""
        heads, kv_heads, dim = map(int, self.shape.split("/"))
        return heads, kv_heads, dim

    def flops(self, pairs: int) -> tuple[int, int]:
        """Return the FLOPs of a forward and of a backward over (query, key) pairs."""
        heads, _, dim = self.sizes
        return FORWARD_FLOPS * heads * dim * pairs, BACKWARD_FLOPS * heads * dim * pairs

    def inputs(self) -> list[Tensor]:
        """Return q, k, v and the gradient of out, (1, heads, S, D) over token-major memory, as a projection leaves them."""
        heads, kv_heads, dim = self.sizes
        generator = torch.Generator(self.device).manual_seed(0)
        options = {"generator": generator, "device": self.device, "dtype": getattr(torch, self.dtype)}
        return [
            torch.randn(1, self.length, n, dim, **options).transpose(1, 2) for n in (heads, kv_heads, kv_heads, heads)
        ]

    def block_kernel(self) -> BlockKernel:
        """Return the kernel that the operator would take."""
        heads, kv_heads, dim = self.sizes
        kernel = select_kernel(
            AttentionOptions(kernel=self.kernel), torch.device(self.device), getattr(torch, self.dtype), dim, Scores()
        )
        return BlockKernel(kernel, dim**-0.5, (HeadGroup((0, heads), (0, kv_heads)),))


@dataclass(frozen=True)
class Timing:
    """Seconds: the median and the range of the repeats."""

    median_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class Clock:
    """How a call is timed."""

    device: str
    warmup: int
    repeats: int

    def time(self, call: Callable[[], object]) -> Timing:
        """Return how long a call takes."""
        for _ in range(self.warmup):
            call()
        found = [self._once(call) for _ in range(self.repeats)]
        return Timing(statistics.median(found), min(found), max(found))

    def _once(self, call: Callable[[], object]) -> float:
        if self.device == "cpu":
            begin = time.process_time()
            call()
            return time.process_time() - begin
        start, end = (torch.cuda.Event(enable_timing=True) for _ in (0, 1))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000


def block_pairs(block: Block) -> int:
    """Return how many (query, key) pairs a block computes."""
    queries, keys = (end - start for start, end in (block.queries, block.keys))
    return queries * keys if block.kind is Kind.FULL else queries * (queries + 1) // 2


def matmul_flops_per_s(size: int, dtype: str, clock: Clock) -> float:
    """Return what the device reaches in a square matrix product."""
    a, b = (torch.randn(size, size, device=clock.device, dtype=getattr(torch, dtype)) for _ in (0, 1))
    return float(2 * size**3 / clock.time(lambda: a @ b).median_s)


def _token_major(tensor: Tensor) -> Tensor:
    """Return what projections and arriving keys are in a model: (B, H, S, D) laid out as (B, S, H, D), which no kernel has to copy."""
    return empty_token_major(tensor, tensor.dtype).copy_(tensor)


class EmulatedRank:
    """One rank of a ring on a device that holds the whole: its part of q, and the keys that would arrive in each hop.

    A class because it holds what must exist before the clock starts.

    Args:
        case: the whole problem.
        ring_size: R.
        rank: this rank's.
        whole: q, k, v, the gradient of out, out and lse of the whole sequence.
    """

    def __init__(self, case: Case, ring_size: int, rank: int, whole: Sequence[Tensor]) -> None:
        layout = SequenceLayout(ring_size, 1)
        self.ring = Ring(plan_of(AttentionMask(), layout, case.length, 1), rank, None)
        self.kernel = case.block_kernel()
        q, k, v, grad, out, lse = whole
        grad, q, out = (_token_major(shard(t, layout, rank, dim=2)) for t in (grad, q, out))
        self.saved = (grad, q, out, shard(lse, layout, rank, dim=2))
        self.steps: list[tuple[list[Block], Tensor, Tensor]] = []
        for hop in range(ring_size):
            k_own, v_own = (shard(t, layout, self.ring.source(hop), dim=2) for t in (k, v))
            ranges, blocks = self.ring.arriving(hop) if hop else ([(0, k_own.shape[2])], list(self.ring.own))
            k_hop, v_hop = (
                _token_major(torch.cat([t[:, :, slice(*held)] for held in ranges], 2)) for t in (k_own, v_own)
            )
            self.steps.append((blocks, k_hop, v_hop))

    @property
    def pairs(self) -> int:
        """Return how many (query, key) pairs this rank computes."""
        return sum(block_pairs(block) for blocks, _, _ in self.steps for block in blocks)

    @property
    def received_bytes(self) -> int:
        """Return what would travel to this rank in a forward."""
        return sum(t.numel() * t.element_size() for _, k, v in self.steps[1:] for t in (k, v))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Compute this rank's out and lse, as `ring_forward` does."""
        running = None
        for blocks, k, v in self.steps:
            running = forward_step(self.kernel, blocks, self.saved[1], k, v, running)
        assert running is not None
        return running[0].to(self.saved[1].dtype), running[1]

    def backward(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Compute dq and, hop by hop, (dk, dv) of the keys that came, as `ring_backward` does; what goes home is summed there."""
        own, *hops = self.steps
        dq, dk, dv = backward_step(self.kernel, own[0], self.saved, own[1:], None)
        partials = [(dk, dv)]
        home = [empty_token_major(t, accumulator_dtype(t.dtype)).copy_(t) for t in (dk, dv) if hops]
        for blocks, k, v in hops:
            dq, *parts = backward_step(self.kernel, blocks, self.saved, (k, v), dq)
            # A rank adds as many that come home to it as it sends.
            for held, part in zip(home, parts, strict=True):
                held[:, :, : part.shape[2]] += part
            partials.append((parts[0], parts[1]))
        return dq.to(self.saved[1].dtype), partials


def whole_forward(case: Case) -> list[Tensor]:
    """Return q, k, v, the gradient of out, out and lse of the whole sequence in one block."""
    q, k, v, grad = case.inputs()
    return [q, k, v, grad, *case.block_kernel().forward(q, k, v, Kind.CAUSAL)]


def emulated_ring(case: Case, ring_size: int) -> list[Tensor]:
    """Return whole (out, dq, dk, dv) as the ranks of a ring compute them: what proves the emulation."""
    layout, whole = SequenceLayout(ring_size, 1), whole_forward(case)
    outs, dqs = [], []
    homes = [[shard(torch.zeros_like(t, dtype=accumulator_dtype(t.dtype)), layout, r, dim=2) for t in whole[1:3]]
             for r in range(ring_size)]  # fmt: skip
    for rank in range(ring_size):
        emulated = EmulatedRank(case, ring_size, rank, whole)
        outs.append(emulated.forward()[0])
        dq, partials = emulated.backward()
        dqs.append(dq)
        for hop, parts in enumerate(partials):
            owner = homes[emulated.ring.source(hop)]
            ranges = emulated.ring.arriving(hop)[0] if hop else [(0, owner[0].shape[2])]
            for home, part in zip(owner, parts, strict=True):
                pieces = part.split_with_sizes([end - start for start, end in ranges], 2)
                for held, piece in zip(ranges, pieces, strict=True):
                    home[:, :, slice(*held)] += piece
    dk, dv = ([home[i].to(whole[1].dtype) for home in homes] for i in (0, 1))
    return [merge(parts, layout, dim=2) for parts in (outs, dqs, dk, dv)]


def kernel_row(case: Case, clock: Clock, matmul: float) -> dict[str, Any]:
    """Time the whole sequence in one block, and a merge of as many tokens."""
    q, k, v, grad, out, lse = whole_forward(case)
    kernel = case.block_kernel()
    forward = clock.time(lambda: kernel.forward(q, k, v, Kind.CAUSAL))
    backward = clock.time(lambda: kernel.backward(grad, q, k, v, out, lse, Kind.CAUSAL))
    running = empty_token_major(out, accumulator_dtype(out.dtype)).copy_(out), lse.clone()
    merging = clock.time(lambda: merge_into(*running, out, lse))
    row = _row(case, 1, case.length * (case.length + 1) // 2, (forward, backward), matmul)
    return row | {"merge": asdict(merging), "merge_share": merging.median_s / forward.median_s}


def ring_row(case: Case, ring_size: int, clock: Clock, matmul: float) -> dict[str, Any]:
    """Time all ranks of a ring, one after the other; their times add up."""
    whole = whole_forward(case)
    times: list[tuple[Timing, Timing]] = []
    pairs, received = 0, []
    for rank in range(ring_size):
        emulated = EmulatedRank(case, ring_size, rank, whole)
        times.append((clock.time(emulated.forward), clock.time(emulated.backward)))
        pairs += emulated.pairs
        received.append(emulated.received_bytes)
    assert pairs == case.length * (case.length + 1) // 2, "every pair once"
    forward, backward = (
        Timing(*(sum(getattr(pair[i], name) for pair in times) for name in ("median_s", "low_s", "high_s")))
        for i in (0, 1)
    )
    # The rank that needs most a second while it computes its forward.
    needed = max(held / pair[0].median_s for held, pair in zip(received, times, strict=True))
    return _row(case, ring_size, pairs, (forward, backward), matmul) | {"hidden_from_bytes_per_s": needed}


def _row(case: Case, ring_size: int, pairs: int, timings: tuple[Timing, Timing], matmul: float) -> dict[str, Any]:
    row: dict[str, Any] = {**asdict(case), "ring_size": ring_size, "pairs": pairs}
    for name, flops, timing in zip(("forward", "backward"), case.flops(pairs), timings, strict=True):
        rate = flops / timing.median_s
        row[name] = {**asdict(timing), "flops": flops, "flops_per_s": rate, "share_of_matmul": rate / matmul}
    return row


def measure(
    cases: Sequence[Case],
    rings: Sequence[int],
    clock: Clock,
    matmul: float,
    keep: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Make a row for each case and ring, the kernel alone first; what does not fit into memory is a row that says so.

    Args:
        cases: the problems.
        rings: ring sizes.
        clock: of the device.
        matmul: FLOP/s of a matrix product there.
        keep: takes all rows so far, after each.
    """
    rows: list[dict[str, Any]] = []
    for case in cases:
        for ring_size in (1, *rings):
            try:
                if ring_size == 1:
                    row = alone = kernel_row(case, clock, matmul)
                else:
                    row = ring_row(case, ring_size, clock, matmul)
                    ratios = {n: row[n]["median_s"] / alone[n]["median_s"] for n in ("forward", "backward")}
                    row["over_kernel"] = ratios
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                row = {**asdict(case), "ring_size": ring_size, "error": "out of memory"}
            rows.append(row)
            print(_line(row), flush=True)
            keep(rows)
            if "error" in row and ring_size == 1:
                break


def _line(row: dict[str, Any]) -> str:
    name = f"| {row['shape']} | {row['length']} | {row['ring_size'] if row['ring_size'] > 1 else 'kernel'} | "
    if "error" in row:
        return f"{name}{row['error']} | | | | |"
    cells = []
    for phase in ("forward", "backward"):
        each = row[phase]
        cells.append(
            f"{1e3 * each['median_s']:.2f} ({1e3 * each['low_s']:.2f}..{1e3 * each['high_s']:.2f}) | "
            f"{each['flops_per_s'] / 1e12:.3g} ({100 * each['share_of_matmul']:.0f}%)"
        )
    if row["ring_size"] == 1:
        last = f"a merge: {1e3 * row['merge']['median_s']:.2f} ms, {100 * row['merge_share']:.1f}% of the forward"
    else:
        ratios = [100 * (row["over_kernel"][phase] - 1) for phase in ("forward", "backward")]
        last = f"{ratios[0]:+.1f}%, {ratios[1]:+.1f}%; hops hidden from {row['hidden_from_bytes_per_s'] / 1e9:.3g} GB/s"
    return f"{name}{' | '.join(cells)} | {last} |"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run from the command line; return what the JSON file holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="query heads/key-value heads/head dim")
    parser.add_argument("--rings", type=int, nargs="*", default=(2, 4, 8))
    parser.add_argument("--kernel", default="auto", choices=("auto", "torch", "flash_attn"))
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--matmul", type=int, default=8192, help="rows and columns of the matrix product")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(argv)
    for length in options.lengths:
        for ring_size in options.rings:
            if length % (2 * ring_size):
                parser.error(
                    f"--lengths {length} is no multiple of {2 * ring_size}, 2 x the ring of --rings {ring_size}"
                )
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here; --device cpu runs the same at small sizes")
    cases = [Case(s, n, options.dtype, options.device, options.kernel) for s in options.shapes for n in options.lengths]
    with torch.no_grad():
        clock = Clock(options.device, options.warmup, options.repeats)
        matmul = matmul_flops_per_s(options.matmul, options.dtype, clock)
        device = torch.cuda.get_device_name() if options.device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
        print(f"{device}, torch {torch.__version__}, {cases[0].block_kernel().kernel.name}, {options.dtype}, causal, batch 1, "
              f"load {os.getloadavg()[0]:.1f}; matrix product of {options.matmul}: {matmul / 1e12:.3g} TFLOP/s\n")  # fmt: skip
        print("| heads/kv/dim | tokens | ring | forward ms | TFLOP/s (of the product's) | backward ms | TFLOP/s | |")
        print("|---|---|---|---|---|---|---|---|")
        result: dict[str, Any] = {"device": device, "torch": torch.__version__, "matmul_flops_per_s": matmul}

        def keep(rows: list[dict[str, Any]]) -> None:
            # Row by row: a machine that is lent for a time may be gone before the last.
            result["rows"] = rows
            if options.json is not None:
                options.json.write_text(json.dumps(result, indent=1))

        measure(cases, options.rings, clock, matmul, keep)
    return result


if __name__ == "__main__":
    main()
