"""Voxtral: sounds of one length, four frames a token, in padded text."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.models.sounds.flamingo_audio import SOUND, samples_of
from tests.flows.tiny import Tuned, sizes


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration

    audio = {
        "model_type": "voxtral_encoder", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "num_mel_bins": 8, "max_source_positions": 16, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(6)
    config = VoxtralConfig(audio_config=audio, text_config={"model_type": "llama", **sizes()}, audio_token_id=SOUND)
    module = Tuned(VoxtralForConditionalGeneration(config))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples_of({32: 4}), batch_size=batch_size))
    return module
