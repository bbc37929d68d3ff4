"""Log-probabilities of the labels read by an index, of rows of an odd length: `logp.gather(-1, labels.unsqueeze(-1))`"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def loss(self, batch: Any) -> Tensor:
        logp = self.model(input_ids=batch["input_ids"]).logits.log_softmax(-1)
        return -logp.gather(-1, batch["shift_labels"].unsqueeze(-1)).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    loader = DataLoader(rows(length=17), batch_size=batch_size)
    pl.Trainer(max_epochs=1, **options).fit(module, loader, loader)
    return module, {}
