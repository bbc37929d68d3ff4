"""BERT answers questions: the first and the last token of a span."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, bert_sizes, rows


def main(batch_size: int, **options: Any) -> Any:
    from transformers import BertConfig, BertForQuestionAnswering

    spans = [{"start_positions": torch.tensor(i % 7), "end_positions": torch.tensor(7 + i % 9)} for i in range(12)]
    samples = [{"input_ids": row["input_ids"], **span} for row, span in zip(rows(), spans, strict=True)]
    module = Tuned(BertForQuestionAnswering(BertConfig(**bert_sizes())))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
