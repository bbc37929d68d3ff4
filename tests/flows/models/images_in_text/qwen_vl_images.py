"""Qwen2.5-VL: images of two sizes in the text, positions in three rows (M-RoPE)."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, rows, sizes

IMAGE, PATCH = 3, 3 * 2 * 4 * 4
GRIDS = ((1, 4, 4), (1, 2, 6))


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Text is stacked; the patches of all images stand one after the other."""
    stacked = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0] if name != "pixel_values"}
    return {**stacked, "pixel_values": torch.cat([sample["pixel_values"] for sample in samples])}


def samples_of() -> list[dict[str, torch.Tensor]]:
    """Rows of text with one image each, of two sizes."""
    samples = []
    for i, row in enumerate(rows(length=24)):
        grid = GRIDS[i % 2]
        number, ids = grid[1] * grid[2] // 4, row["input_ids"].clone()
        ids[4 + i % 3 : 4 + i % 3 + number] = IMAGE
        samples.append(
            {
                "input_ids": ids,
                "labels": ids.masked_fill(ids == IMAGE, -100),
                "attention_mask": torch.ones_like(ids),
                "mm_token_type_ids": (ids == IMAGE).long(),
                "pixel_values": torch.randn(grid[1] * grid[2], PATCH),
                "image_grid_thw": torch.tensor(grid),
            }
        )
    return samples


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = dict(
        depth=2, hidden_size=32, intermediate_size=48, num_heads=4, patch_size=4, temporal_patch_size=2, spatial_merge_size=2,
        out_hidden_size=32, window_size=16, fullatt_block_indexes=[1],
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    tokens = dict(image_token_id=IMAGE, video_token_id=4, vision_start_token_id=5, vision_end_token_id=5)
    config = Qwen2_5_VLConfig(text_config=sizes(rope_parameters=rope), vision_config=vision, **tokens)
    torch.manual_seed(6)
    samples = samples_of()
    module = Tuned(Qwen2_5_VLForConditionalGeneration(config))
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=collate)
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
