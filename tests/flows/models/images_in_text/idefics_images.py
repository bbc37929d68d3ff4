"""Idefics 3: an image in each row, validated before the first step, while no training step has shown which modules are a tower's."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, rows, sizes

IMAGE, SIDE, PATCH, NUM_TOKENS = 3, 16, 4, 4


class Validated(Tuned):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True)


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=LlamaConfig(**sizes()), vision_config=vision, image_token_id=IMAGE, scale_factor=2
    )
    torch.manual_seed(6)
    samples = []
    for i, row in enumerate(rows(length=24)):
        ids = row["input_ids"].clone()
        ids[4 + i % 3 :][:NUM_TOKENS] = IMAGE
        samples.append(
            {
                "input_ids": ids,
                "labels": ids.masked_fill(ids == IMAGE, -100),
                "attention_mask": torch.ones_like(ids),
                "pixel_values": torch.randn(1, 3, SIDE, SIDE),
            }
        )
    module = Validated(Idefics3ForConditionalGeneration(config))
    loader = DataLoader(samples, batch_size=batch_size)
    trainer = pl.Trainer(max_epochs=1, **{**options, "num_sanity_val_steps": 2})
    trainer.fit(module, loader, loader)
    return module
