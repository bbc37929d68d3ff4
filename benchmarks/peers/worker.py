"""One rank of one competitor: waits for a line on stdin, runs a forward and backward, and answers with a line of JSON.

    python -m benchmarks.peers.worker PEER VARIANT '{"length": 8192, ...}' REFERENCE      (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set)

Knows torch alone, so that it runs in every competitor's environment. A competitor is a module here with

    build(variant, problem, rank, world) -> (attend, shard)      attend: local (q, k, v) -> local out;  shard: whole -> local;  all (B, S, H, D)
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.instruments.end_with_parent import end_with_parent
from benchmarks.instruments.resident import Growth, peak_growth
from benchmarks.instruments.written import written_bytes


def inputs(problem: dict[str, Any]) -> list[Tensor]:
    """Return whole q, k, v and the gradient of out, (B, S, H, D)."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads = problem["heads"], problem["kv_heads"]
    shapes = [(1, problem["length"], h, problem["dim"]) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def whole(problem: dict[str, Any], tensors: list[Tensor]) -> list[Tensor]:
    """Run torch's own causal attention on the whole sequence: out and the gradients of q, k, v, (B, S, H, D)."""
    *qkv, grad = (t.transpose(1, 2) for t in tensors)
    leaves = [t.detach().requires_grad_(True) for t in qkv]
    gqa = problem["heads"] != problem["kv_heads"]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=gqa)
    out.backward(grad)
    return [t.transpose(1, 2) for t in (out.detach(), *(t.grad for t in leaves if t.grad is not None))]


def main(peer: str, variant: str, text: str, reference: str) -> None:
    """Serve runs until stdin ends."""
    # A rank that waits for another one reads no stdin.
    end_with_parent()
    problem = json.loads(text)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # One process takes all cores, ranks one thread each, as their launchers would set it.
    torch.set_num_threads(os.cpu_count() or 1 if world == 1 else 1)
    dist.init_process_group("gloo")
    tensors = inputs(problem)
    answers: Any = sys.stdout
    sys.stdout = sys.stderr  # what a competitor prints is no answer
    if peer == "one_process":
        locals_, attend = tensors, None
        torch.save(whole(problem, tensors), reference)
    else:
        attend, shard = importlib.import_module(f"benchmarks.peers.{peer}").build(variant, problem, rank, world)
        locals_ = [shard(t).contiguous() for t in tensors]
    del tensors
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        out: Tensor | None = None
        *qkv, grad = (t.detach().clone() for t in locals_)
        for t in qkv:
            t.requires_grad_(True)
        gc.collect()
        dist.barrier()
        measure_peak = line.strip() == "peak"
        with peak_growth() if measure_peak else nullcontext(Growth()) as growth:
            written = written_bytes()
            wall, cpu = time.perf_counter(), time.process_time()
            if attend is None:
                got = whole(problem, [*qkv, grad])
            else:
                out = attend(*qkv)
                out.backward(grad)
                got = [out.detach(), *(t.grad for t in qkv)]
            cpu = time.process_time() - cpu
            dist.barrier()
            wall, written = time.perf_counter() - wall, written_bytes() - written
        answer = {"cpu_s": cpu, "wall_s": wall, "peak": growth.peak_bytes, "written": written, "error": 0.0}
        if line.strip() == "check" and attend is not None:
            expected = [shard(t) for t in torch.load(reference)]
            answer["error"] = max(_error(a, b) for a, b in zip(got, expected, strict=True))
            del expected
        # Nothing of a run may serve the next: what is free but held would hide what that needs.
        out = None
        del got, qkv, grad
        print(json.dumps(answer), file=answers, flush=True)


def _error(actual: Tensor, expected: Tensor) -> float:
    """Return max|a - b| / max(1, max|b|), the measure of the law."""
    return float((actual - expected).abs().max() / max(1.0, float(expected.abs().max())))


def contiguous(rank: int, world: int) -> Any:
    """Return the shard of consecutive tokens."""
    return lambda t: t.chunk(world, 1)[rank]


def zigzag(rank: int, world: int) -> Any:
    """Return the shard of the chunks `rank` and `2 world - 1 - rank` of 2 world."""
    return lambda t: torch.cat([t.chunk(2 * world, 1)[i] for i in (rank, 2 * world - 1 - rank)], 1)


if __name__ == "__main__":
    Path(sys.argv[4]).parent.mkdir(parents=True, exist_ok=True)
    main(*sys.argv[1:5])
