"""EncoderDecoderModel: two BERTs, one reads a padded text, the other writes its summary of another length."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, bert_sizes, rows


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = pad_sequence([each["input_ids"] for each in samples], batch_first=True)
    labels = pad_sequence([each["labels"] for each in samples], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import BertConfig, BertLMHeadModel, BertModel, EncoderDecoderModel

    torch.manual_seed(6)
    encoder = BertModel(BertConfig(**bert_sizes()), add_pooling_layer=False)
    decoder = BertLMHeadModel(BertConfig(**bert_sizes(), is_decoder=True, add_cross_attention=True))
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    samples = []
    for i, row in enumerate(rows(length=24)):
        labels = row["input_ids"].flip(0)[: 11 + i % 3].clone()
        labels[3 + i % 4 :][:2] = -100  # the decoder does not see them either
        samples.append({"input_ids": row["input_ids"][: 24 - i % 4], "labels": labels})
    module = Tuned(model)
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size, collate_fn=collate))
    return module
