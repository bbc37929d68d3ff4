"""A LightningDataModule of the user's own, with validation and test."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, texts, tokenizer


class Texts(pl.LightningDataModule):
    """Texts, tokenized in setup."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        words = tokenizer()
        self.samples = {part: [words(text) for text in texts(8, 16, 16, seed)] for seed, part in enumerate("abc")}
        self.words = words

    def loader(self, part: str) -> Any:
        from transformers import DataCollatorForLanguageModeling

        return DataLoader(
            self.samples[part], batch_size=self.batch_size, 
            collate_fn=DataCollatorForLanguageModeling(self.words, mlm=False),
        )  # fmt: skip

    def train_dataloader(self) -> Any:
        return self.loader("a")

    def val_dataloader(self) -> Any:
        return self.loader("b")

    def test_dataloader(self) -> Any:
        return self.loader("c")


class Module(Tuned):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.model(**batch).loss, sync_dist=True)


def main(batch_size: int, **options: Any) -> Any:
    module, data = Module(llama()), Texts(batch_size)
    trainer = pl.Trainer(max_epochs=2, **options)
    trainer.fit(module, data)
    validated = float(trainer.callback_metrics["val_loss"])
    (tested,) = trainer.test(module, data, verbose=False)
    return module, {"val_loss": validated, **tested}
