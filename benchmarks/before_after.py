"""Two checkouts of this project beside each other: CPU-seconds of attention and of training, pair by pair, and whether each bit is the same.

    git worktree add /somewhere/before COMMIT
    OMP_NUM_THREADS=1 python benchmarks/before_after.py --before /somewhere/before

Each side is a process of its own with its own ranks, which stay between the pairs. The sides of a pair run one after the other, in turn which
first. CPU-seconds are summed over the ranks. A case is "the same" where the median of the ratios is within 3%, or their 95% interval holds 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from math import comb
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelStrategy
from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.layout import shard
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from lightning_sp.models import CausalLM, LlamaConfig
from lightning_sp.testing import RankPool

ATTENTION = {
    "ulysses 4": dict(ulysses=4, ring=1),
    "ring 4, shared memory": dict(ulysses=1, ring=4, ring_transport="shared_memory"),
    "ring 4, network": dict(ulysses=1, ring=4, ring_transport="network"),
    "ulysses 2 x ring 2": dict(ulysses=2, ring=2),
    "ulysses 2 x ring 2, window": dict(ulysses=2, ring=2, window=512),
    "ulysses 2 x ring 2, softcap": dict(ulysses=2, ring=2, softcap=20.0, length=2048),
}
TRAINING = {
    "training, ulysses 2": dict(ulysses_size=2),
    "training, ring 2": dict(ring_size=2),
}
LENGTH = 4096


def attend(case: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Run attention forward and backward on this rank: CPU-seconds and a digest of outputs and gradients."""
    options = dict(case)
    ulysses, ring, length = options.pop("ulysses"), options.pop("ring"), options.pop("length", LENGTH)
    window = options.pop("window", None)
    base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=ulysses * ring)
    mesh = SequenceMesh.build(base, ring_size=ring, ulysses_size=ulysses)
    mask = AttentionMask(True, window_size=(None, None) if window is None else (window - 1, None))
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        shard(torch.randn(1, length, 8, 64, generator=generator), mesh.layout, mesh.sequence_rank, dim=1).transpose(
            1, 2
        )
        for _ in range(4)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_(True)
    start = time.process_time()
    for _ in range(repeats):
        for tensor in (q, k, v):
            tensor.grad = None
        out = sequence_parallel_attention(q, k, v, mesh=mesh, mask=mask, **options)
        out.backward(grad)
    spent = time.process_time() - start
    return {"cpu_s": spent, "digest": _digest([out, q.grad, k.grad, v.grad])}


def train(options: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """Train a small Llama on this rank of two: CPU-seconds and a digest of the weights."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (num_steps, 2049), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": t[:-1], "shift_labels": t[1:], "position_ids": torch.arange(2048)} for t in tokens]
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(preflight=False, **options), accelerator="cpu", devices=2, max_steps=num_steps,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    config = LlamaConfig(vocab_size=257, dim=256, num_layers=4, num_heads=8, num_kv_heads=4, hidden_dim=768)
    module = CausalLM(config, max_steps=num_steps)
    start = time.process_time()
    trainer.fit(module, DataLoader(rows, batch_size=1))
    spent = time.process_time() - start
    weights = [getattr(p, "full_tensor", lambda p=p: p)() for p in module.parameters()]
    return {"cpu_s": spent, "digest": _digest(weights)}


def _digest(tensors: list[Any]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def serve() -> None:
    """Answer the cases that come by standard input, one a line, on ranks that stay."""
    with RankPool(4, timeout_s=600) as four, RankPool(2, timeout_s=600) as two:
        for line in sys.stdin:
            name, repeats = json.loads(line)
            pool, function, cases = (four, attend, ATTENTION) if name in ATTENTION else (two, train, TRAINING)
            answers = pool.run(function, cases[name], repeats)
            total = sum(each["cpu_s"] for each in answers)
            print("ANSWER " + json.dumps([total, [each["digest"] for each in answers]]), flush=True)


class Side:
    """One checkout, in a process with ranks of its own."""

    def __init__(self, tree: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve"], cwd=tree, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, name: str, repeats: int) -> tuple[float, list[str]]:
        """Return the CPU-seconds of a case and the digests of its ranks."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, repeats]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                seconds, digests = json.loads(line[7:])
                return seconds, digests
        raise SystemExit(f"the side of {self.process.args} ended")

    def close(self) -> None:
        """End it and its ranks."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def compare(before: Path, after: Path, pairs: int, repeats: int, words: list[str]) -> None:
    """Print a row for each case."""
    sides = [Side(before), Side(after)]
    print(f"{'case':30} | CPU-seconds before | after / before (95% interval of the median) | bits | verdict")
    for name in [n for n in (*ATTENTION, *TRAINING) if not words or any(word in n for word in words)]:
        seconds: list[list[float]] = [[], []]
        same = True
        for side in sides:
            side.ask(name, 2)  # the first is not counted: caches, plans, groups
        for pair in range(pairs):
            digests: list[list[str]] = [[], []]
            for index in (0, 1) if pair % 2 == 0 else (1, 0):
                spent, digests[index] = sides[index].ask(name, repeats)
                seconds[index].append(spent)
            same = same and digests[0] == digests[1]
        ratios = sorted(b / a for a, b in zip(*seconds, strict=True))
        low, high = interval(ratios)
        median = statistics.median(ratios)
        verdict = "the same" if abs(median - 1) <= 0.03 or low <= 1 <= high else "DIFFERENT"
        print(
            f"{name:30} | {statistics.median(seconds[0]):18.2f} | {median:.3f} ({low:.3f}..{high:.3f}) of {pairs} pairs | "
            f"{'equal' if same else 'NOT EQUAL'} | {verdict}",
            flush=True,
        )
    for side in sides:
        side.close()


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95% interval of the median of sorted numbers, by their order statistics (the binomial distribution of 1/2)."""
    n, below, rank = len(ratios), 0.0, 0
    while rank < n // 2:
        below += comb(n, rank) / 2**n
        if below > 0.025:
            break
        rank += 1
    return ratios[max(rank - 1, 0)], ratios[n - 1 - max(rank - 1, 0)]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--after", type=Path, default=Path(__file__).resolve().parents[1], help="a checkout; this one")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=6, help="steps in each run")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="parts of cases' names; none: every case")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
    else:
        compare(
            arguments.before.resolve(), arguments.after.resolve(), arguments.pairs, arguments.repeats, arguments.words
        )


if __name__ == "__main__":
    main()
