"""Qwen3-VL: images of two sizes in the text, features of the tower's inner layers added in the text's first layers (DeepStack)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.models.images_in_text.qwen_vl_images import IMAGE, collate, samples_of
from tests.flows.tiny import Tuned, sizes


def model() -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = dict(
        depth=3, hidden_size=32, intermediate_size=48, num_heads=4, patch_size=4, temporal_patch_size=2, spatial_merge_size=2,
        out_hidden_size=32, num_position_embeddings=64, deepstack_visual_indexes=[0, 1],
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    tokens = dict(image_token_id=IMAGE, video_token_id=4, vision_start_token_id=5, vision_end_token_id=5)
    config = Qwen3VLConfig(text_config=sizes(head_dim=8, rope_parameters=rope), vision_config=vision, **tokens)
    torch.manual_seed(6)
    return Qwen3VLForConditionalGeneration(config)


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    module = Tuned(model())
    loader = DataLoader(samples_of(), batch_size=batch_size, collate_fn=collate)
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
