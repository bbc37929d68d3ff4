"""Two optimizers by hand, each toggled in its turn, over layers that are the LightningModule's own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelStrategy
from tests.trainer.tiny import VOCAB, TokenDataset


class Taking(pl.LightningModule):
    """The gradient of one turn is not put to zero before the next one: a weight that is toggled off must have none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.embed, self.qkv, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 48), nn.Linear(16, VOCAB)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch["input_ids"])
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["shift_labels"].flatten())

    def configure_optimizers(self) -> Any:
        first = [*self.embed.parameters(), *self.qkv.parameters()]
        return torch.optim.SGD(first, lr=0.1), torch.optim.SGD(self.head.parameters(), lr=0.1)


def trained(world: int) -> dict[str, Tensor]:
    """Return the weights after two steps."""
    module = Taking()
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=SequenceParallelStrategy(ring_size=world) if world > 1 else "auto", max_steps=4,
        precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    weights: dict[str, Any] = {name: each.detach() for name, each in module.named_parameters()}
    return {n: (w.full_tensor() if hasattr(w, "full_tensor") else w).clone() for n, w in weights.items()}
