"""Two ranks whose hosts have other checkpoints under one name: what each rank runs in test_other_hosts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


class Validated(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx), sync_dist=True)


def validate(folder: str, as_folder: bool) -> str:
    """Save twice, the weights halved between, and validate where each rank finds another one; return what was said."""
    torch.manual_seed(0)
    module = Validated(tiny_llama)
    strategy = {"preflight": False, "save_distributed_checkpoint": as_folder}
    trainer, loader = quiet_trainer(2, strategy=strategy, max_steps=1), DataLoader(TokenDataset(2), batch_size=2)
    trainer.fit(module, loader)
    trainer.save_checkpoint(f"{folder}/0.ckpt")
    with torch.no_grad():
        for each in module.parameters():
            each.mul_(0.5)
    trainer.save_checkpoint(f"{folder}/1.ckpt")

    def of_host(self: Any, path: str, *_: Any) -> Path:
        return Path(path).with_name(f"{self.global_rank}.ckpt")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceParallelStrategy, "_path_of_rank_0", of_host)
        try:
            trainer.validate(module, loader, ckpt_path=f"{folder}/0.ckpt", verbose=False)
        except SequenceParallelError as error:
            return str(error)
    return ""
