"""What the ranks of test_noted_parameters run: weights with attributes, by which an optimizer has its groups and a forward computes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainer.tiny import VOCAB, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama


class Decays(nn.Module):
    """A gain for each channel that no optimizer is to decay, and whose scale stands on it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((VOCAB,), 2.0))
        self.gain._no_weight_decay, self.gain.scale = True, 0.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain * self.gain.scale  # type: ignore[attr-defined]


class Noted(pl.LightningModule):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.model: Any = None if late else nn.ModuleList([tiny_llama(), Decays()])
        self.groups: list[int] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = nn.ModuleList([tiny_llama(), Decays()])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model[1](self.model[0](batch["input_ids"], batch["position_ids"]))
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def configure_optimizers(self) -> Any:
        kept = [each for each in self.parameters() if getattr(each, "_no_weight_decay", False)]
        others = [each for each in self.parameters() if not hasattr(each, "_no_weight_decay")]
        self.groups.append(len(kept))
        return torch.optim.AdamW([dict(params=kept, weight_decay=0.0), dict(params=others)], lr=0.01, weight_decay=0.5)


def fit(world: int, late: bool) -> tuple[dict[str, Tensor], list[int]]:
    """Fit twice, the second time behind a move that makes the parameters anew; return the weights and how many were found each time."""
    torch.manual_seed(3)
    module = Noted(late)
    for _ in range(2):
        trainer = quiet_trainer(world, strategy={"global_view": "auto"}) if world > 1 else plain_trainer(max_epochs=1)
        trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
        module._apply(torch.clone)
    return {name: _full(each.detach()).clone() for name, each in module.named_parameters()}, module.groups
