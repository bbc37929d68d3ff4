"""Runs that go on under plain Lightning, and runs of plain Lightning that go on here: what each rank runs in test_plain_resume.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama

ONE_FILE = {"save_distributed_checkpoint": False, "preflight": False}


def fit(trainer: Any, path: Path | None = None) -> tuple[Any, list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module = Plain(tiny_llama)
    trainer.fit(module, DataLoader(TokenDataset(8), batch_size=2), ckpt_path=path)
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    return trainer, list(module.losses), weights


def go_on(folder: str) -> dict[str, Any]:
    """Train an epoch here and one under plain Lightning, and the other way round; return losses and weights, and those of two epochs there."""
    ours, _, _ = fit(quiet_trainer(2, strategy=ONE_FILE))
    ours.save_checkpoint(Path(folder) / "ours.ckpt")
    plain, _, _ = fit(plain_trainer(max_epochs=1))
    theirs = Path(folder) / f"plain{ours.global_rank}.ckpt"
    plain.save_checkpoint(theirs)
    ours.strategy.barrier()
    return {
        "one device": fit(plain_trainer(max_epochs=2))[1:],
        "there": fit(plain_trainer(max_epochs=2), Path(folder) / "ours.ckpt")[1:],
        "here": fit(quiet_trainer(2, strategy=ONE_FILE, max_epochs=2), Path(folder) / "plain0.ckpt")[1:],
    }
