"""PaliGemma: an image and a prefix that see each other both ways, and a suffix that is learned."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, rows, sizes


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    vision = dict(
        model_type="siglip_vision_model", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=12,
        patch_size=4, projection_dim=32, vision_use_head=False,
    )  # fmt: skip
    text = dict(model_type="gemma", head_dim=8, **sizes())
    config = PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=3, projection_dim=32, vocab_size=VOCABULARY
    )
    torch.manual_seed(6)
    samples = []
    for row in rows(length=24):
        ids = row["input_ids"].clone()
        ids[:9] = 3
        suffix = (torch.arange(24) >= 14).long()
        samples.append(
            {
                "input_ids": ids,
                "labels": ids.masked_fill(suffix == 0, -100),
                "attention_mask": torch.ones_like(ids),
                "token_type_ids": suffix,
                "pixel_values": torch.randn(3, 12, 12),
            }
        )
    module = Tuned(PaliGemmaForConditionalGeneration(config))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
