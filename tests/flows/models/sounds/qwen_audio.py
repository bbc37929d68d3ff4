"""Qwen2-Audio: sounds of two lengths in the text, their tokens placed where the text says, padded; a loss of its own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, rows, sizes

SOUND = 3


def model() -> Any:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    audio = dict(
        d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16,
        dropout=0.0, encoder_layerdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(6)
    return Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(audio_config=audio, text_config=dict(model_type="qwen2", **sizes()), audio_token_index=SOUND)
    )


def samples_of() -> list[dict[str, Tensor]]:
    samples = []
    generator = torch.Generator().manual_seed(6)
    for i, row in enumerate(rows(length=24)):
        ids, mask = row["input_ids"].clone(), torch.ones(24, dtype=torch.long)
        # 32 frames give 8 tokens, 24 give 6.
        frames, tokens = (32, 8) if i % 2 else (24, 6)
        ids[4 + i % 3 : 4 + i % 3 + tokens] = SOUND
        mask[24 - i % 4 :] = 0
        samples.append(
            {
                "input_ids": ids,
                # Of padding too: the model leaves out what the mask hides.
                "labels": ids.masked_fill(ids == SOUND, -100),
                "attention_mask": mask,
                "input_features": torch.randn(8, 32, generator=generator),
                "feature_attention_mask": (torch.arange(32) < frames).long(),
            }
        )
    return samples


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    module = Tuned(model())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples_of(), batch_size=batch_size))
    return module
