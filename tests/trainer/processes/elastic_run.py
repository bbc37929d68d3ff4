"""What a user runs by torchrun, with as many ranks as there are: in its first life one of them dies in its fifth step,
or is slow from there on, for others are to join it.

python -m tests.trainer.processes.elastic_run FOLDER (whole | rank | node | slow)
"""

from __future__ import annotations

import os
import signal
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

NUM_STEPS = 8


class User(Plain):
    def __init__(self, folder: Path, dies: str) -> None:
        super().__init__(tiny_llama)
        self.folder, self.dies = folder, dies

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 4 and self.trainer.global_rank == 1 and not (self.folder / "died").exists():
            self.die()
        if self.dies == "slow" and self.trainer.world_size == 1 and self.trainer.global_step >= 4:
            time.sleep(5)
        if self.trainer.is_global_zero:
            with (self.folder / "losses.txt").open("a") as stream:
                stream.write(f"{self.trainer.global_step} {self.trainer.world_size} {float(loss.detach())}\n")
        return loss

    def die(self) -> None:
        """End as an out-of-memory killer ends a rank, or the loss of its node a rank and its agent."""
        if self.dies in ("whole", "slow"):
            return
        (self.folder / "died").touch()
        if self.dies == "node":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, dies: str) -> None:
    torch.manual_seed(0)
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(preflight=False, timeout_s=20.0, start_timeout_s=120.0), accelerator="cpu", precision="64-true",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[ModelCheckpoint(dirpath=folder + "/checkpoints", every_n_train_steps=2, save_top_k=0, save_last=True)],
    )  # fmt: skip
    loader = DataLoader(TokenDataset(2 * NUM_STEPS), batch_size=2, shuffle=True)
    trainer.fit(User(Path(folder), dies), loader, ckpt_path="last")


if __name__ == "__main__":
    main(*sys.argv[1:])
