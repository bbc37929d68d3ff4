"""Granite Speech: sounds that a frozen conformer reads, whose attention is its own, gathered by a Q-Former; a loss of its own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.models.sounds.flamingo_audio import SOUND, samples_of
from tests.flows.tiny import Tuned, sizes


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import GraniteSpeechConfig, GraniteSpeechForConditionalGeneration

    encoder = {
        "input_dim": 8, "num_layers": 2, "hidden_dim": 32, "num_heads": 4, "output_dim": 12, "context_size": 6, "max_pos_emb": 16,
        "dropout": 0.0, "conv_kernel_size": 3, "initializer_range": 0.2,
    }  # fmt: skip
    projector = {
        "model_type": "blip_2_qformer", "hidden_size": 32, "encoder_hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(6)
    config = GraniteSpeechConfig(
        text_config={"model_type": "granite", **sizes()}, encoder_config=encoder, projector_config=projector,
        audio_token_index=SOUND, has_lora_adapter=False, downsample_rate=4, window_size=8, tie_word_embeddings=False,
    )  # fmt: skip
    module = Tuned(GraniteSpeechForConditionalGeneration(config))
    # As it is tuned: the encoder's batch norm would count each data-parallel group for itself.
    module.model.model.encoder.requires_grad_(False).eval()
    samples = [{**each, "input_features": each["input_features"].T} for each in samples_of({32: 8})]
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
