"""Training in the global view and on one device: weights and losses after some steps."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from tests.global_view.models.modules import Module, module_of, rows

STEPS = 2


def trained(module: Any, strategy: Any, devices: int, length: int, num_rows: int = 4) -> dict[str, Any]:
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=STEPS, precision="64-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows(length), batch_size=num_rows))
    weights = {}
    for name, parameter in module.named_parameters():
        whole: Any = parameter.detach()
        weights[name] = (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).clone()
    return {"weights": weights, "losses": module.losses[-STEPS:]}


def one_process(loss: str, length: int) -> dict[str, Any]:
    return trained(module_of(loss), "auto", 1, length)


def in_global_view(losses: list[str], length: int, world: int, options: dict[str, Any], view: Any = True) -> list[Any]:
    found: list[Any] = []
    rows_of_a_group = 4 // options.get("data_parallel_size", 1)
    for loss in losses:
        strategy = SequenceParallelStrategy(global_view=view, **options)
        try:
            answer = trained(module_of(loss), strategy, world, length, rows_of_a_group)
            found.append({**answer, "sees_whole": strategy.sees_whole_sequences})
        except SequenceParallelError as error:
            found.append(str(error))
    return found


class Drawing(Module):
    """Draws positions, and drops features of each token, by a block that is recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__("mean_pooled")
        self.drawn: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids = batch["input_ids"]
        position = torch.randint(0, ids.shape[1], (ids.shape[0],))
        x = self.model.hidden(ids)
        kept = torch.utils.checkpoint.checkpoint(F.dropout, x, 0.5, use_reentrant=False)
        self.drawn.append((position.tolist(), (kept == 0).local.tolist()))
        return kept[torch.arange(ids.shape[0]), position].square().mean() + kept.mean()


def draws(length: int) -> list[Any]:
    """Return what a rank drew in each step: whole numbers, and of its own tokens."""
    module = Drawing()
    trained(module, SequenceParallelStrategy(global_view=True, ring_size=2, preflight=False), 2, length)
    return module.drawn
