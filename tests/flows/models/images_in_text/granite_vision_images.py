"""Granite 4 Vision: an image in each row, whose features are added in several layers of the text (DeepStack)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, rows, sizes

IMAGE, SIDE = 3, 16


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import CLIPVisionConfig, Granite4VisionConfig, Granite4VisionForConditionalGeneration

    # Its reader of windows has a head for 64 numbers.
    vision = CLIPVisionConfig(
        hidden_size=128, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=SIDE, patch_size=4, projection_dim=32
    )  # fmt: skip
    config = Granite4VisionConfig(
        text_config=sizes(num_hidden_layers=3), vision_config=vision, image_token_index=IMAGE, downsample_rate="1/2",
        image_grid_pinpoints=[[SIDE, SIDE]], deepstack_layer_map=[[-1, 0], [-2, 1]], spatial_target_layers=[0, 1, 2, 2], projector_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(6)
    model = Granite4VisionForConditionalGeneration(config)
    for each in model.modules():
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0
        if hasattr(each, "attention_dropout"):
            each.attention_dropout = 0.0
    samples = []
    for i, row in enumerate(rows(length=24)):
        ids = row["input_ids"].clone()
        ids[4 + i % 3 : 14 + i % 3] = IMAGE
        samples.append(
            {
                "input_ids": ids,
                "labels": ids.masked_fill(ids == IMAGE, -100),
                "attention_mask": torch.ones_like(ids),
                "pixel_values": torch.randn(2, 3, SIDE, SIDE),
                "image_sizes": torch.tensor([SIDE, SIDE]),
            }
        )
    module = Tuned(model)
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
