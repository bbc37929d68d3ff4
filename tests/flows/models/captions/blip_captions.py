"""BLIP captions images: its text decoder attends to the image's tokens in each layer, by attention written out by hand."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.flows.models.captions.vit_gpt2_captions import captions
from tests.flows.tiny import VOCABULARY, Tuned


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = pad_sequence([each["labels"] for each in samples], batch_first=True)
    return {
        "pixel_values": torch.stack([each["pixel_values"] for each in samples]),
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": ids.masked_fill(ids == 0, -100),
    }


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import BlipConfig, BlipForConditionalGeneration

    text = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "encoder_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "sep_token_id": 2, "initializer_range": 0.2,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
        "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(6)
    module = Tuned(BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=vision)))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(captions(), batch_size=batch_size, collate_fn=collate))
    return module
