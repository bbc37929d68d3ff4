"""GLM-ASR: sounds of two lengths with their mask, four frames a token, read by an encoder with rotary positions."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.models.sounds.flamingo_audio import SOUND, samples_of
from tests.flows.tiny import Tuned, sizes


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import GlmAsrConfig, GlmAsrForConditionalGeneration

    audio = {
        "model_type": "glmasr_encoder", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "num_mel_bins": 8, "max_position_embeddings": 16, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(6)
    config = GlmAsrConfig(audio_config=audio, text_config={"model_type": "llama", **sizes()}, audio_token_id=SOUND)
    module = Tuned(GlmAsrForConditionalGeneration(config))
    samples = samples_of({32: 4, 24: 3}, "input_features_mask")
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
