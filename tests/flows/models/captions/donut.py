"""Donut: a VisionEncoderDecoderModel of Swin and MBart parses documents; the step hands it images and labels by name."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.models.captions.vit_gpt2_captions import captions, collate
from tests.flows.tiny import VOCABULARY, Tuned


class Parser(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(pixel_values=batch["pixel_values"], labels=batch["labels"]).loss
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import DonutSwinConfig, DonutSwinModel, MBartConfig, MBartForCausalLM, VisionEncoderDecoderModel

    torch.manual_seed(6)
    encoder = DonutSwinModel(
        DonutSwinConfig(
            image_size=16, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4, drop_path_rate=0.0,
            initializer_range=0.2,
        ),
        add_pooling_layer=False,
    )  # fmt: skip
    decoder = MBartForCausalLM(
        MBartConfig(
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
            is_decoder=True,
            add_cross_attention=True,
        )
    )
    model = VisionEncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    module = Parser(model)
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(captions(), batch_size=batch_size, collate_fn=collate))
    return module
