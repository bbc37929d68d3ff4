"""Qwen2-Audio: sounds in the text, their tokens placed where the text says."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, rows, sizes


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    audio = dict(
        d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16,
        dropout=0.0, encoder_layerdrop=0.0,
    )  # fmt: skip
    config = Qwen2AudioConfig(audio_config=audio, text_config=dict(model_type="qwen2", **sizes()), audio_token_index=3)
    torch.manual_seed(6)
    samples = []
    for i, row in enumerate(rows(length=24)):
        ids = row["input_ids"].clone()
        ids[4 + i % 3 : 12 + i % 3] = 3
        samples.append(
            {
                "input_ids": ids,
                "labels": ids.masked_fill(ids == 3, -100),
                "attention_mask": torch.ones_like(ids),
                "input_features": torch.randn(8, 32),
                "feature_attention_mask": torch.ones(32, dtype=torch.long),
            }
        )
    module = Tuned(Qwen2AudioForConditionalGeneration(config))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
