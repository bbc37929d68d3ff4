"""Two ranks, the second of which dies in its second step: as a script that Lightning's launcher starts on both, and as a call in each."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelStrategy
from tests.trainer.tiny import Plain, TokenDataset, tiny_llama


class Dying(Plain):
    def __init__(self, how: str) -> None:
        super().__init__(tiny_llama)
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and os.environ.get("LOCAL_RANK") == "1":
            if self.how == "exit":
                os._exit(3)
            if self.how == "hang":
                print("hangs", flush=True)
                time.sleep(600)
            raise ValueError("boom on rank 1")
        return super().training_step(batch, batch_idx)


def fit(how: str) -> None:
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(preflight=False), accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Dying(how), DataLoader(TokenDataset(4), batch_size=2))


if __name__ == "__main__":
    fit(sys.argv[1])
