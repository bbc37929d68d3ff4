"""A reward model: Hugging Face's head for sequences gives a number for each answer, the better one's is larger."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.reductions import batch_mean
from tests.flows.tiny import Tuned, sizes, texts, tokenizer


class Reward(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rewards = self.model(**batch).logits[:, 0]
        loss = batch_mean(-F.logsigmoid(rewards[::2] - rewards[1::2]))
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    words = tokenizer()

    def collate(pairs: list[Any]) -> Any:
        rows = [{"input_ids": words(text)["input_ids"]} for pair in pairs for text in pair]
        return words.pad(rows, return_tensors="pt")

    pairs = list(zip(texts(12), texts(12, seed=1), strict=True))
    module = Reward(LlamaForSequenceClassification(LlamaConfig(**sizes(num_labels=1))))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(pairs, batch_size=batch_size, collate_fn=collate))
    return module
