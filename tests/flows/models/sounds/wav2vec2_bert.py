"""SpeechEncoderDecoderModel: wav2vec 2.0 reads waveforms of two lengths with their mask, BERT as a decoder writes ragged texts."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, bert_sizes, rows


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = {name: torch.stack([each[name] for each in samples]) for name in ("input_values", "attention_mask")}
    return {**batch, "labels": pad_sequence([each["labels"] for each in samples], batch_first=True, padding_value=-100)}


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import (
        BertConfig,
        BertLMHeadModel,
        SpeechEncoderDecoderModel,
        Wav2Vec2Config,
        Wav2Vec2Model,
    )  # fmt: skip

    torch.manual_seed(6)
    encoder = Wav2Vec2Model(
        Wav2Vec2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            conv_dim=(16, 16),
            conv_stride=(4, 4),
            conv_kernel=(8, 8),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=2,
            feat_extract_norm="layer",
            do_stable_layer_norm=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            layerdrop=0.0,
            apply_spec_augment=False,
            initializer_range=0.2,
            mask_time_prob=0.0,
        )
    )
    decoder = BertLMHeadModel(BertConfig(**bert_sizes(), is_decoder=True, add_cross_attention=True))
    model = SpeechEncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    samples = []
    for i, row in enumerate(rows()):
        frames = 320 if i % 2 else 240
        heard = torch.arange(320) < frames
        samples.append(
            {
                "input_values": torch.randn(320) * heard,
                "attention_mask": heard.long(),
                "labels": row["input_ids"][: 11 + i % 5],
            }
        )
    module = Tuned(model)
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size, collate_fn=collate))
    return module
