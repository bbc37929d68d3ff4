"""TrOCR: a VisionEncoderDecoderModel of ViT and a decoder whose attention is written out by hand reads lines of text."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.models.captions.vit_gpt2_captions import captions, collate, vision_sizes
from tests.flows.tiny import VOCABULARY, Tuned


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import TrOCRConfig, TrOCRForCausalLM, VisionEncoderDecoderModel, ViTConfig, ViTModel

    torch.manual_seed(6)
    decoder = TrOCRForCausalLM(
        TrOCRConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            dropout=0.0,
            init_std=0.2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            cross_attention_hidden_size=32,
        )
    )
    model = VisionEncoderDecoderModel(
        encoder=ViTModel(ViTConfig(**vision_sizes()), add_pooling_layer=False), decoder=decoder
    )
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    module = Tuned(model)
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(captions(), batch_size=batch_size, collate_fn=collate))
    return module
