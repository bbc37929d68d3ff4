"""A list of two training loaders of other lengths: the shorter one begins again, and a batch is a list of two."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, texts, tokenizer


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        chat, code = batch
        loss = self.model(**chat).loss + 0.5 * self.model(**code).loss
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import DataCollatorForLanguageModeling

    words = tokenizer()
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    loaders = [
        DataLoader([words(text) for text in texts(number, seed=seed)], batch_size=batch_size, collate_fn=collate)
        for seed, number in enumerate((12, 8))
    ]
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, loaders)
    return module
