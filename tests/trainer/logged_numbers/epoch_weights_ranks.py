"""What each rank runs in test_epoch_weights.py: a fit and its validation on batches whose first dim is the sequence."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainer.tiny import VOCAB, plain_trainer, quiet_trainer


class TokensFirst(pl.LightningModule):
    """Attention over (S, B) tokens; it logs means over an epoch, without a batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embedding(batch["input_ids"]).transpose(0, 1).unsqueeze(1)
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1).transpose(0, 1)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch["shift_labels"].flatten())
        self.log("loss" if self.training else "val_loss", loss, on_step=False, on_epoch=True)
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(world: int, strategy: dict[str, Any] | None) -> dict[str, float]:
    """Return what is logged of an epoch of sequences that are cut into unlike parts of their lengths."""
    torch.manual_seed(3)
    module = TokensFirst()
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, VOCAB, (length + 1, 3), generator=generator) for length in (17, 24, 9, 30)]
    data = [{"input_ids": each[:-1], "shift_labels": each[1:]} for each in ids]
    options: dict[str, Any] = dict(max_epochs=1, num_sanity_val_steps=0)
    trainer = plain_trainer(**options) if strategy is None else quiet_trainer(world, strategy=strategy, **options)
    trainer.fit(module, DataLoader(data, batch_size=None), DataLoader(data, batch_size=None))
    return {name: float(each) for name, each in trainer.callback_metrics.items()}
