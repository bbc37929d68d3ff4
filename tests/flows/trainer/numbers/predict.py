"""`trainer.predict` gives logits of whole sequences."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"]).logits.argmax(-1)


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    trainer = pl.Trainer(max_epochs=1, **options)
    trainer.fit(module, DataLoader(rows(), batch_size=batch_size))
    predicted = trainer.predict(module, DataLoader(rows(4), batch_size=batch_size))
    return module, {"sum": float(sum(each.double().sum() for each in predicted))}
