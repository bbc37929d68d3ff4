"""What the host does for one call of the attention, forward and backward: microseconds, and of them those of this package's own lines.

    python -m benchmarks.steps.attention_host

One rank of a world that torch makes up (its fake process group), on real host tensors of a few numbers, so that what is measured is the way to
the kernels and messages and not these. Least of 15, by the process' CPU-seconds. A layer's, a hop's and a stage's are differences of two calls.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import time
import timeit
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.instruments.own_seconds import own_seconds, profiler_costs
from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.mesh import SequenceMesh, build_device_mesh

# Llama 3 8B's heads; of a rank's tokens and of a head's numbers a few.
HEADS, KV_HEADS, HEAD_DIM, TOKENS = 32, 8, 8, 4
CALLS = 100
# Ulysses, ring, stages.
CASES = {
    "Ulysses 8": (8, 1, 1),
    "Ulysses 8 in 4 stages": (8, 1, 4),
    "ring 4": (1, 4, 1),
    "ring 8": (1, 8, 1),
    "8 x 8": (8, 8, 1),
}


def measure(ulysses: int, ring: int, stages: int) -> dict[str, float]:
    """Return microseconds of a call, those of own lines, and calls of own functions. One world a process."""
    dist.init_process_group("fake", rank=0, world_size=ulysses * ring, store=FakeStore())
    with mock.patch("lightning_sp.mesh._share_memory", return_value="not in this world"):
        base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=ulysses * ring)
        mesh = SequenceMesh.build(base, ring_size=ring, ulysses_size=ulysses)
    q, k, v = (torch.randn(1, heads, TOKENS, HEAD_DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    mask, upstream = AttentionMask(), torch.ones_like(q)

    def call() -> None:
        sequence_parallel_attention(
            q, k, v, mesh=mesh, mask=mask, ring_method="hops", ring_transport="network", ulysses_stages=stages
        ).backward(upstream)

    def calls() -> None:
        for _ in range(CALLS):
            call()

    calls()
    seconds = min(timeit.repeat(calls, number=1, repeat=15, timer=time.process_time))
    costs, profiles = profiler_costs(), []
    for _ in range(15):
        profiles.append(cProfile.Profile())
        profiles[-1].runcall(calls)
    own = own_seconds(profiles, _is_own, costs)
    num = sum(n for (file, _, _), (_, n, *_) in pstats.Stats(profiles[0]).stats.items() if _is_own(file))  # type: ignore[attr-defined]
    return {"us": seconds / CALLS * 1e6, "own": sum(own.values()) / CALLS * 1e6, "calls": num / CALLS}


def _is_own(file: str) -> bool:
    return "/lightning_sp/" in file


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=int, nargs=3, metavar=("ULYSSES", "RING", "STAGES"), help="one, as JSON")
    given = parser.parse_args().case
    if given:
        print(json.dumps(measure(*given)))
        return
    found = {}
    print("| one call, forward and backward | us | us in own lines | calls of own functions |\n|---|---|---|---|")
    for name, case in CASES.items():
        command = [sys.executable, "-m", "benchmarks.steps.attention_host", "--case", *map(str, case)]
        found[name] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print("| " + " | ".join([name, *(f"{each:.0f}" for each in found[name].values())]) + " |", flush=True)
    for what, more, less, number in (
        ("a hop more", "ring 8", "ring 4", 4),
        ("a stage more", "Ulysses 8 in 4 stages", "Ulysses 8", 3),
    ):
        each = ((found[more][key] - found[less][key]) / number for key in found[less])
        print("| " + " | ".join([what, *(f"{one:.0f}" for one in each)]) + " |")


if __name__ == "__main__":
    main()
