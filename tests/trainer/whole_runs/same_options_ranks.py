"""What each rank runs in test_same_options.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


def resumed(folder: str) -> list[str]:
    """Resume on rank 0 alone, on rank 1 alone, and on both; return what is said of each."""
    path = f"{folder}/x.ckpt"
    loader = DataLoader(TokenDataset(8), batch_size=2)
    first = quiet_trainer(2, strategy={"preflight": False}, max_steps=2)
    first.fit(Plain(tiny_llama), loader)
    first.save_checkpoint(path)
    said = []
    for ranks in ((0,), (1,), (0, 1)):
        trainer = quiet_trainer(2, strategy={"preflight": False}, max_steps=3)
        try:
            module = Plain(tiny_llama)
            trainer.fit(module, loader, ckpt_path=path if dist.get_rank() in ranks else None)
            said.append(f"resumed at step {trainer.global_step - len(module.losses)}")
        except SequenceParallelError as error:
            said.append(str(error))
    return said


def refused(folder: str) -> list[str]:
    """Give rank 1 another option than rank 0, one after the other; return what is said of each."""
    first = dist.get_rank() == 0
    saves = [ModelCheckpoint(folder, every_n_train_steps=2 if first else 3)]
    cases: list[dict[str, Any]] = [
        {"gradient_clip_val": 0.1 if first else 0.2},
        {"accumulate_grad_batches": 1 if first else 2, "max_steps": 4 if first else 5},
        {"strategy": {"preflight": first}},
        {"callbacks": saves, "enable_checkpointing": True},
        {"callbacks": saves[: int(first)], "enable_checkpointing": first},
        {"max_time": "00:00:01:00"} if first else {},
        {"precision": "64-true"},
    ]
    said = [_refused(options) for options in cases]
    version = torch.__version__
    if first:
        torch.__version__ = "2.0"
    said.append(_refused({}))
    torch.__version__ = version
    torch.use_deterministic_algorithms(first)
    said.append(_refused({}))
    torch.use_deterministic_algorithms(False)
    module = Plain(tiny_llama)
    module.automatic_optimization = first
    return [*said, _refused({}, module)]


def _refused(options: dict[str, Any], module: Plain | None = None) -> str:
    """Fit, and return what is refused."""
    trainer = quiet_trainer(2, **{"strategy": {"preflight": False}, "max_steps": 1, **options})
    try:
        trainer.fit(module or Plain(tiny_llama), DataLoader(TokenDataset(4), batch_size=2))
    except SequenceParallelError as error:
        return str(error)
    return "trained"
