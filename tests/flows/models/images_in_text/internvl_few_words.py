"""InternVL, with fewer words than a row has tokens: its labels could be places in the sequence"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, rows, sizes

IMAGE, SIDE, PATCH, NUM_TOKENS, NUM_WORDS = 3, 16, 4, 4, 22


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import InternVLConfig, InternVLForConditionalGeneration, LlamaConfig

    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": [SIDE, SIDE],
        "patch_size": [PATCH, PATCH],
    }  # fmt: skip
    config = InternVLConfig(
        text_config=LlamaConfig(**sizes(vocab_size=NUM_WORDS)),
        vision_config=vision,
        image_token_id=IMAGE,
        downsample_ratio=0.5,
    )
    torch.manual_seed(6)
    samples = []
    for row in rows(length=24):
        ids = row["input_ids"] % (NUM_WORDS - IMAGE - 1) + IMAGE + 1
        ids[4:][:NUM_TOKENS] = IMAGE
        samples.append(
            {
                "input_ids": ids,
                "labels": ids.masked_fill(ids == IMAGE, -100),
                "attention_mask": torch.ones_like(ids),
                "pixel_values": torch.randn(3, SIDE, SIDE),
            }
        )
    module = Tuned(InternVLForConditionalGeneration(config))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
