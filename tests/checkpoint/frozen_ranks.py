"""Runs in ranks: fits of a frozen body and a trained head, whose checkpoints leave the body out."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.checkpoint import EXCLUDED
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, _full, quiet_trainer, tiny_llama


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.adapter = tiny_llama(1), nn.Linear(VOCAB, VOCAB)
        self.body.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.body(input_ids, position_ids))


class Module(Plain):
    """Its body is the same in each run, as one that is read from a pretrained model is."""

    def __init__(self, seed: int, freeze_at: int | None = None) -> None:
        super().__init__(Adapted)
        self.seed, self.freeze_at = seed, freeze_at

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(self.seed)
            self.model = self.build()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == self.freeze_at:
            self.model.adapter.requires_grad_(False)
            self.model.body.requires_grad_(True)


def run(
    strategy: dict[str, Any],
    *,
    save: str = "",
    resume: str = "",
    steps: int = 4,
    seed: int = 1,
    freeze_at: int | None = None,
) -> dict[str, Any]:
    """Fit, and save or resume; return the weights and what the checkpoint names."""
    module = Module(seed, freeze_at)
    strategy = dict(preflight=False, **strategy)
    trainer = quiet_trainer(int(os.environ["WORLD_SIZE"]), strategy=strategy, max_steps=steps)
    try:
        trainer.fit(module, DataLoader(TokenDataset(size=8), batch_size=1), ckpt_path=resume or None)
        if save:
            trainer.save_checkpoint(save)
    except SequenceParallelError as error:
        return {"error": str(error)}
    return {"error": "", "weights": {name: _full(each.detach()).clone() for name, each in module.named_parameters()}}


def read(path: str) -> tuple[list[str], list[str]]:
    """Return the names of a file's tensors, and of what was left out."""
    checkpoint = torch.load(path, weights_only=False)
    return sorted(checkpoint["state_dict"]), checkpoint[EXCLUDED]
