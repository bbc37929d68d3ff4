"""DistilBERT classifies texts, and is validated: a head that takes the first token in its own way"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, sizes, texts, tokenizer


class Module(Tuned):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import DataCollatorWithPadding, DistilBertConfig, DistilBertForSequenceClassification

    words = tokenizer(model_input_names=["input_ids", "attention_mask"])
    samples = [{**words(text), "label": i % 3} for i, text in enumerate(texts(12))]
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=DataCollatorWithPadding(words))
    config = DistilBertConfig(
        vocab_size=sizes()["vocab_size"], dim=32, hidden_dim=48, n_layers=2, n_heads=4, dropout=0.0, attention_dropout=0.0,
        seq_classif_dropout=0.0, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    module = Module(DistilBertForSequenceClassification(config))
    pl.Trainer(max_epochs=1, **options).fit(module, loader, loader)
    return module
