"""What runs in the ranks: a fit on windows that the data set draws by torch's own stream, and one that goes on from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama

LENGTH = 32


class Windows(TokenDataset):
    """Windows of a text, at places that are drawn."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        first = int(torch.randint(0, LENGTH, ()))
        return {**row, "input_ids": row["input_ids"].roll(first), "shift_labels": row["shift_labels"].roll(first)}


class Noted(Plain):
    def __init__(self) -> None:
        super().__init__(tiny_llama)
        self.seen: list[list[int]] = []

    def on_before_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        if self.trainer.training:
            self.seen.append(batch["input_ids"][:, :4].flatten().tolist())
        return batch


def fit(strategy: dict[str, Any], folder: str, stop: int) -> Any:
    """Return the batches that this rank saw in two epochs; with `stop` saved behind so many steps, and gone on in another fit."""
    world = torch.distributed.get_world_size()
    loader = DataLoader(Windows(8, LENGTH), batch_size=2, shuffle=True)
    seen: list[list[int]] = []
    path = None
    try:
        for last in (stop, -1) if stop else (-1,):
            torch.manual_seed(3)
            module = Noted()
            trainer = quiet_trainer(world, strategy={"preflight": False, **strategy}, max_epochs=2, max_steps=last)
            trainer.fit(module, loader, ckpt_path=path)
            path = f"{folder}/stopped"
            trainer.save_checkpoint(path)
            seen += module.seen
    except SequenceParallelError as error:
        return str(error)
    return seen
