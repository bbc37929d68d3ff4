"""Parameters of shape (): a scale in each block, a temperature that the step reads, the weight of a term, one that is frozen, one of no use"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Scaled(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale.exp()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.temperature = llama(), nn.Parameter(torch.tensor(1.5))
        for layer in self.text.model.layers:
            layer.mlp = Scaled(layer.mlp)

    def forward(self, ids: Tensor) -> Tensor:
        return self.text(ids).logits


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(Model())
        self.weight, self.unused = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.tensor(1.1), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]) / self.model.temperature
        assert (1.0 * self.model.temperature).shape == ()
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        assert self.weight.shape == self.frozen.shape == ()
        self.log("train_loss", loss * self.frozen)
        return loss * self.frozen * torch.exp(-self.weight) + self.weight

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(batch_size: int, **options: Any) -> Any:
    module = Module()
    trainer = pl.Trainer(max_epochs=1, gradient_clip_val=1.0, **options)
    trainer.fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
