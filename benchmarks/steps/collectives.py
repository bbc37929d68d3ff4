"""FSDP2's own collectives on gloo against the direct ones: a training step of a stack of MLPs, for each number of ranks.

    python -m benchmarks.steps.collectives                     2 and 4 ranks, 16.8M parameters
    python -m benchmarks.steps.collectives --worlds 2 --repeats 9

Both models live in the same ranks and take turns step by step, so that they meet the same machine; the ratio is within a turn, and its median is
shown. Bytes are those that a rank wrote to its sockets, by the kernel's count of what the process wrote (`/proc/self/io`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.instruments.written import written_bytes
from lightning_sp.parallelize import shard_model
from lightning_sp.testing import RankPool, max_error

NUM_BLOCKS, DIM, HIDDEN = 4, 1024, 2048


def build(direct: bool) -> nn.Module:
    """Return the sharded stack, as the strategy shards it or by FSDP2 alone."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM)) for _ in range(NUM_BLOCKS)]
    model = nn.Sequential(*blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    if direct:
        shard_model(model, blocks, mesh)
    else:
        for unit in (*blocks, model):
            fully_shard(unit, mesh=mesh)
    assert isinstance(model, FSDPModule)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor) -> dict[str, float]:
    """Train one step; return wall and CPU seconds and bytes of this rank."""
    dist.barrier()
    start = time.perf_counter(), time.process_time(), written_bytes()
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
    end = time.perf_counter(), time.process_time(), written_bytes()
    return {name: b - a for name, a, b in zip(("wall_s", "cpu_s", "sent_bytes"), start, end, strict=True)}


def race(repeats: int, batch: int) -> dict[str, Any]:
    """Return every step of both, in turns that change the order, and how far their weights are apart in the end."""
    warnings.filterwarnings("ignore")
    models = {"default": build(False), "direct": build(True)}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in models.items()}
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in models}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for turn in range(repeats + 1):
        data = torch.randn(batch, DIM, generator=generator)
        for name in sorted(models, reverse=bool(turn % 2)):
            steps[name].append(step(models[name], optimizers[name], data))
    pairs = zip(models["default"].parameters(), models["direct"].parameters(), strict=True)
    error = max(max_error(b.full_tensor(), a.full_tensor()) for a, b in pairs)  # type: ignore[attr-defined]
    return {"steps": {name: each[1:] for name, each in steps.items()}, "error": error}


def together(ranks: list[dict[str, Any]], name: str) -> list[dict[str, float]]:
    """Return each step of all ranks: the longest wall, the sum of CPU-seconds, the mean MiB of a rank."""
    return [
        {
            "wall_s": max(each["wall_s"] for each in turn),
            "cpu_s": sum(each["cpu_s"] for each in turn),
            "sent_mib": statistics.mean(each["sent_bytes"] for each in turn) / 2**20,
        }
        for turn in zip(*(rank["steps"][name] for rank in ranks), strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--batch", type=int, default=4, help="rows of a rank: few, so that the collectives show")
    arguments = parser.parse_args()
    num_parameters = NUM_BLOCKS * (2 * DIM * HIDDEN + DIM + HIDDEN)
    print(
        f"{num_parameters / 1e6:.1f}M parameters, float32, {arguments.batch} rows a rank, {arguments.repeats} turns\n"
    )
    print("| ranks | | wall ms | CPU ms, all ranks | MiB sent per rank | largest difference of weights | load |")
    print("|---|---|---|---|---|---|---|")
    for world in arguments.worlds:
        with RankPool(world, timeout_s=600) as pool:
            ranks = pool.run(race, arguments.repeats, arguments.batch)
        both = {name: together(ranks, name) for name in ("default", "direct")}
        for name, turns in both.items():
            wall, cpu, sent = (
                statistics.median(turn[key] for turn in turns) for key in ("wall_s", "cpu_s", "sent_mib")
            )
            print(f"| {world} | {name} | {1e3 * wall:.0f} | {1e3 * cpu:.0f} | {sent:.1f} | | |")
        ratios = []
        for key in ("wall_s", "cpu_s", "sent_mib"):
            each = [b[key] / a[key] for a, b in zip(both["default"], both["direct"], strict=True)]
            ratios.append(f"{statistics.median(each):.2f} ({min(each):.2f}..{max(each):.2f})")
        print(
            f"| {world} | direct / default | {' | '.join(ratios)} | {ranks[0]['error']:.0e} | {os.getloadavg()[0]:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
