"""A training step through the Trainer: sequences split over processes against one process, the same model and global batch.

    python -m benchmarks.steps.training speed    one process with 2 threads against 2 ranks, interleaved
    python -m benchmarks.steps.training memory   peak resident memory per rank at sp = 1, 2, 4 for one length

Ratios of one run, and CPU-seconds beside walls: machines differ and are shared.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_sp import SequenceParallelStrategy
from lightning_sp.models import CausalLM, LlamaConfig
from lightning_sp.testing import RankPool

MODEL = dict(vocab_size=257, dim=256, num_layers=4, num_heads=8, num_kv_heads=4, hidden_dim=768)


class Tokens(Dataset):
    """One sequence a step."""

    def __init__(self, size: int, length: int) -> None:
        self.tokens = torch.randint(0, 256, (size, length + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index]
        return {"input_ids": row[:-1], "shift_labels": row[1:], "position_ids": torch.arange(len(row) - 1)}


class Clock(pl.Callback):
    """Wall and CPU seconds of each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.start = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append((time.perf_counter() - self.start[0], time.process_time() - self.start[1]))


def train(world: int, threads: int, length: int, num_steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps on the running ranks."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock = Clock()
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(preflight=False, **options), accelerator="cpu", devices=world, max_steps=num_steps,
        callbacks=[clock], logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = CausalLM(LlamaConfig(**MODEL), max_steps=num_steps)
    trainer.fit(module, DataLoader(Tokens(num_steps, length), batch_size=1))
    return {"steps": clock.steps[1:], "loss": float(trainer.callback_metrics["train_loss"]), "peak_mib": peak_mib()}


def peak_mib() -> float:
    """Return the peak resident memory of this process (VmHWM)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def speed(lengths: list[int], pairs: int, num_steps: int) -> None:
    """Print tokens/s of 2 ranks over those of one process with 2 threads, pair by pair."""
    with RankPool(1, timeout_s=600) as one, RankPool(2, timeout_s=600) as two:
        for length in lengths:
            for options in (dict(ulysses_size=2), dict(ring_size=2)):
                ratios, cpu_ratios, losses = [], [], set()
                for _ in range(pairs):
                    single = one.run(train, 1, 2, length, num_steps, {})[0]
                    split = two.run(train, 2, 1, length, num_steps, options)
                    walls = [statistics.median(s for s, _ in run["steps"]) for run in (single, split[0])]
                    cpus = [sum(c for _, c in single["steps"]), sum(c for run in split for _, c in run["steps"])]
                    ratios.append(walls[0] / walls[1])
                    cpu_ratios.append(cpus[1] / cpus[0])
                    losses.add((round(single["loss"], 5), round(split[0]["loss"], 5)))
                print(
                    f"S={length} {options}: tokens/s over one process {statistics.median(ratios):.3f} "
                    f"(min {min(ratios):.3f}, max {max(ratios):.3f}; last walls {walls[0]:.2f} s, {walls[1]:.2f} s), "
                    f"CPU-seconds over one process {statistics.median(cpu_ratios):.3f}, losses {sorted(losses)}, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )


def memory(length: int, num_steps: int) -> None:
    """Print the peak resident memory of each rank, in fresh processes."""
    for world, options in (
        (1, {}),
        (2, dict(ulysses_size=2)),
        (2, dict(ring_size=2)),
        (4, dict(ulysses_size=4)),
        (4, dict(ring_size=4)),
    ):
        with RankPool(world, timeout_s=600) as pool:
            before = pool.run(peak_mib)
            runs = pool.run(train, world, 1, length, num_steps, options)
        print(
            f"S={length} sp={world} {options}: peak MiB per rank {[round(r['peak_mib']) for r in runs]}, "
            f"of which {[round(b) for b in before]} before training",
            flush=True,
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "memory"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of each run; the first is not counted")
    arguments = parser.parse_args()
    if arguments.what == "speed":
        speed(arguments.lengths, arguments.pairs, arguments.steps)
    else:
        memory(arguments.lengths[-1], arguments.steps)


if __name__ == "__main__":
    main()
