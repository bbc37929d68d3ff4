"""A long run: 2,000 steps on 2 ranks, with evaluations, checkpoints and resumes; does a rank's memory grow, or leave files and threads?

    make soak                       2,000 steps in four fits of one process, each resumed from the last one's checkpoint
    make soak ARGS="--steps 400"    fewer

Memory is compared from the end of the first fit on: libraries are loaded by then, and each cache has seen each kind of step. Fails where it has
grown by more than 1% on some rank, or where a rank has more open files or threads than it had.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from benchmarks.instruments.resident import peak_growth, resident_bytes
from lightning_sp.testing import RankPool
from tests.trainer.tiny import VOCAB, HuggingFaceLlama, Plain, quiet_trainer

FITS, ALLOWED = 4, 0.01
_LENGTHS = (64, 96, 128)


class Found(NamedTuple):
    """What a rank holds at a step."""

    step: int
    resident: int
    files: int
    threads: int

    @staticmethod
    def at(step: int) -> Found:
        """Look, after what can be freed has been."""
        gc.collect()
        with peak_growth():
            pass  # gives back what the allocator keeps
        return Found(step, resident_bytes(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


class _Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of three lengths, in turn."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(0, VOCAB, (_LENGTHS[index % len(_LENGTHS)],), generator=generator)
        return {"input_ids": row, "shift_labels": row.roll(-1), "position_ids": torch.arange(len(row))}


class _Module(Plain):
    """Keeps no list of its own that grows."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.clear()
        self.layouts.clear()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx), sync_dist=True)


class _Watch(pl.Callback):
    """Looks at this process every so many steps."""

    def __init__(self, every: int) -> None:
        self.every, self.found, self.last = every, list[Found](), 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % self.every == 0 and trainer.global_step > self.last:
            self.last = trainer.global_step
            self.found.append(Found.at(trainer.global_step))


def run(steps: int, folder: str) -> list[Found]:
    """Train; each fit by a Trainer and a module of its own."""
    watch = _Watch(steps // 20)
    for fit in range(1, FITS + 1):
        torch.manual_seed(0)
        checkpoint = ModelCheckpoint(folder, save_last=True, save_top_k=1, every_n_train_steps=steps // 20)
        trainer = quiet_trainer(
            2, strategy=dict(ulysses_size=2), precision="32-true", max_steps=fit * steps // FITS, max_epochs=-1,
            enable_checkpointing=True, callbacks=[checkpoint, watch], val_check_interval=steps // 20, check_val_every_n_epoch=None,
            limit_val_batches=2,
        )  # fmt: skip
        loaders = DataLoader(_Rows(steps), batch_size=1), DataLoader(_Rows(4), batch_size=1)
        trainer.fit(_Module(HuggingFaceLlama), *loaders, ckpt_path="last" if fit > 1 else None)
        assert trainer.global_step == fit * steps // FITS
    return watch.found


def verdict(found: Sequence[Found], first: int) -> list[str]:
    """Return what has grown since a step."""
    begin = next(each for each in found if each.step >= first)
    end = found[-1]
    growth = end.resident / begin.resident - 1
    said = []
    if growth > ALLOWED:
        said.append(f"memory grew by {growth:.1%} from step {begin.step:,} on ({ALLOWED:.0%} allowed)")
    for name in ("files", "threads"):
        if getattr(end, name) > getattr(begin, name):
            said.append(f"{getattr(end, name)} {name}, {getattr(begin, name)} at step {begin.step:,}")
    return said


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 where something grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args(argv)
    if options.steps % 20 or options.steps < 80:
        parser.error(f"--steps {options.steps}: must be a multiple of 20, 80 at least")
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, RankPool(2, timeout_s=10 * options.steps) as pool:
        of_ranks = pool.run(run, options.steps, folder)
        left = sorted(each.name for each in Path(folder).iterdir())
    print(f"| rank | step | resident MiB | files | threads |\n|{'---|' * 5}")
    for rank, found in enumerate(of_ranks):
        for each in found:
            print(f"| {rank} | {each.step:,} | {each.resident / 2**20:.1f} | {each.files} | {each.threads} |")
    said = [
        f"rank {rank}: {line}" for rank, found in enumerate(of_ranks) for line in verdict(found, options.steps // FITS)
    ]
    print(
        f"\n{options.steps:,} steps in {FITS} fits, {time.perf_counter() - begin:.0f} s; in the folder of checkpoints: {', '.join(left)}"
    )
    print("\n".join(said) or "nothing grew")
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
