"""What each rank runs in test_addresses.py."""

from __future__ import annotations

from typing import Any

import fsspec
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.checkpoint import latest_checkpoint, read_checkpoint_folder
from lightning_sp.testing import max_error
from tests.checkpoint.folders import store
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama

__all__ = ["refused", "resumed", "store"]


def _fitted(folder: str, *, steps: int, ckpt_path: Any = None, **options: Any) -> Plain:
    torch.manual_seed(0)
    module = Plain(tiny_llama)
    trainer = quiet_trainer(
        dist.get_world_size() if dist.is_initialized() else 1, strategy={"preflight": False, **options}, max_steps=steps, max_epochs=-1,
        enable_checkpointing=True, callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=0, save_last=True)],
    )  # fmt: skip
    trainer.fit(module, DataLoader(TokenDataset(8), batch_size=2), ckpt_path=ckpt_path)
    return module


def resumed(address: str, as_folder: bool) -> dict[str, Any]:
    """Train two steps, go on from the address, and compare with four at once."""
    whole = _fitted(f"{address}/whole", steps=4, save_distributed_checkpoint=as_folder)
    _fitted(f"{address}/runs", steps=2, save_distributed_checkpoint=as_folder)
    latest = latest_checkpoint(f"{address}/runs")
    module = _fitted(f"{address}/runs", steps=4, ckpt_path=latest, save_distributed_checkpoint=as_folder)
    files, root = fsspec.core.url_to_fs(f"{address}/runs")
    return {
        "latest": latest,
        "names": sorted(each[len(root) + 1 :] for each in files.find(root)),
        "steps": module.trainer.global_step,
        "weights": max(
            max_error(a.full_tensor(), b.full_tensor()) if hasattr(a, "full_tensor") else max_error(a, b)
            for a, b in zip(whole.parameters(), module.parameters(), strict=True)
        ),
        "read": as_folder and read_checkpoint_folder(str(latest))["global_step"],
    }


def refused() -> dict[str, Any]:
    """Begin a run whose checkpoints are in each rank's own memory."""
    said = ""
    try:
        _fitted("memory://runs", steps=2)
    except SequenceParallelError as error:
        said = str(error)
    return {"said": said, "left": fsspec.filesystem("memory").find("/runs")}
