"""ModernBERT classifies padded texts by the mean of their tokens' states: classifier_pooling='mean'"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, bert_sizes, texts, tokenizer


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import DataCollatorWithPadding, ModernBertConfig, ModernBertForSequenceClassification

    words = tokenizer(model_input_names=["input_ids", "attention_mask"])
    samples = [{**words(text), "label": i % 3} for i, text in enumerate(texts(12))]
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=DataCollatorWithPadding(words))
    sizes = bert_sizes(num_labels=3, classifier_pooling="mean", cls_token_id=1, sep_token_id=2, eos_token_id=2)
    module = Tuned(ModernBertForSequenceClassification(ModernBertConfig(**sizes, attention_dropout=0.0)))
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
