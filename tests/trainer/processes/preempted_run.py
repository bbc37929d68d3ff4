"""What a user runs on two ranks, until a signal ends it: it goes on from what it finds in its folder.

python -m tests.trainer.processes.preempted_run FOLDER [hang]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelStrategy
from tests.trainer.tiny import Plain, TokenDataset, tiny_llama

NUM_STEPS = 12


class User(Plain):
    def __init__(self, folder: Path, how: str) -> None:
        super().__init__(tiny_llama)
        self.folder, self.how = folder, how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.how == "waits" and self.trainer.global_step == 4:
            self.wait_for_the_signal()
        if self.how == "hangs" and self.trainer.global_step == 4 and self.trainer.is_global_zero:
            print("begun", flush=True)
            time.sleep(600)
        if self.trainer.is_global_zero:
            with (self.folder / "losses.txt").open("a") as stream:
                stream.write(f"{self.trainer.global_step} {float(loss.detach()).hex()}\n")
        return loss

    def wait_for_the_signal(self) -> None:
        """Stay in this step until rank 0 has been told."""
        told: Any = self.trainer.strategy
        if self.trainer.is_global_zero:
            print("begun", flush=True)
            while not told._sigterm.is_told:
                time.sleep(0.05)
        self.trainer.strategy.barrier()


def main(folder: str, how: str) -> None:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(preflight=False, preemption_limit_s=3.0 if how == "hangs" else 60.0), accelerator="cpu", devices=2,
        max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[ModelCheckpoint(dirpath=folder + "/checkpoints", every_n_train_steps=1)],
    )  # fmt: skip
    ckpt_path = None if how == "slurm" else "last"
    trainer.fit(
        User(Path(folder), how), DataLoader(TokenDataset(NUM_STEPS), batch_size=2, shuffle=True), ckpt_path=ckpt_path
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
