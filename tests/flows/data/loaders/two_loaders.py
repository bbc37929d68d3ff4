"""Two training loaders at once: CombinedLoader gives a batch of each."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, texts, tokenizer


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch["chat"]).loss + 0.5 * self.model(**batch["code"]).loss
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import DataCollatorForLanguageModeling

    words = tokenizer()
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    loaders = {
        name: DataLoader([words(text) for text in texts(12, seed=seed)], batch_size=batch_size, collate_fn=collate)
        for seed, name in enumerate(("chat", "code"))
    }
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, CombinedLoader(loaders, "min_size"))
    return module
