"""LLaVA: an image in each row, its tokens placed into the text."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, rows, sizes


def main(batch_size: int, **options: Any) -> Any:
    torch.manual_seed(6)
    samples = [with_image(row) for row in rows(length=24)]
    module = Tuned(model())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module


def with_image(row: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = row["input_ids"].clone()
    ids[4:13] = 3
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == 3, -100),
        "pixel_values": torch.randn(3, 12, 12),
        "attention_mask": torch.ones_like(ids),
    }


def model() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text = LlamaConfig(**sizes())
    image = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=12,
        patch_size=4,
        projection_dim=32,
    )
    config = LlavaConfig(
        vision_config=image,
        text_config=text,
        image_token_id=3,
        image_seq_length=9,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    return LlavaForConditionalGeneration(config)
