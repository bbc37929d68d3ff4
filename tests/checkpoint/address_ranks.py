"""What each rank runs in test_addresses.py."""

from __future__ import annotations

from typing import Any

import fsspec
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.checkpoint import latest_checkpoint
from lightning_sp.testing import max_error
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


def _fitted(folder: str, *, steps: int, ckpt_path: Any = None, world: int = 1, **options: Any) -> Plain:
    torch.manual_seed(0)
    module = Plain(tiny_llama)
    trainer = quiet_trainer(
        world, strategy={"preflight": False, **options}, max_steps=steps, max_epochs=-1, enable_checkpointing=True,
        callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=0, save_last=True)],
    )  # fmt: skip
    trainer.fit(module, DataLoader(TokenDataset(8), batch_size=2), ckpt_path=ckpt_path)
    return module


def resumed() -> dict[str, Any]:
    """Train two steps, go on from the address, and compare with four at once."""
    whole = _fitted("memory://whole", steps=4, save_distributed_checkpoint=False)
    _fitted("memory://runs", steps=2, save_distributed_checkpoint=False)
    latest = latest_checkpoint("memory://runs")
    module = _fitted("memory://runs", steps=4, ckpt_path=latest, save_distributed_checkpoint=False)
    files: Any = fsspec.filesystem("memory")
    return {
        "latest": latest,
        "names": files.find("/runs"),
        "steps": module.trainer.global_step,
        "weights": max(max_error(a, b) for a, b in zip(whole.parameters(), module.parameters(), strict=True)),
    }


def refused() -> list[dict[str, Any]]:
    """Begin a run with checkpoints at addresses that a folder cannot be at."""
    found = []
    for dirpath in ("memory://runs", "memory://others/deep"):
        torch.manual_seed(0)
        trainer = quiet_trainer(
            2,
            strategy={"preflight": False},
            max_steps=2,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(dirpath=dirpath)],
        )
        said = ""
        try:
            trainer.fit(Plain(tiny_llama), DataLoader(TokenDataset(8), batch_size=2))
        except SequenceParallelError as error:
            said = str(error)
        found.append({"said": said, "steps": trainer.global_step})
    return found
