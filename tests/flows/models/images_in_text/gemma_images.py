"""Gemma 3 with an image in each row, whose tokens see each other both ways."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, rows, sizes


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
    )
    text = sizes(head_dim=8, sliding_window=5)
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=3, boi_token_index=4, eoi_token_index=5
    )  # fmt: skip
    torch.manual_seed(6)
    samples = []
    for i, row in enumerate(rows(length=24)):
        ids = row["input_ids"].clone()
        ids[8 + i % 3 : 12 + i % 3] = 3
        samples.append(
            {
                "input_ids": ids,
                "labels": ids.masked_fill(ids == 3, -100),
                "attention_mask": torch.ones_like(ids),
                "token_type_ids": (ids == 3).long(),
                "pixel_values": torch.randn(3, 16, 16),
            }
        )
    model = Gemma3ForConditionalGeneration(config)
    # It begins at zero, and the norm behind it would divide float32's rounding of the loss by nearly nothing.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)
    module = Tuned(model)
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
