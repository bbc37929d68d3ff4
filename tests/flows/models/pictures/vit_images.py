"""A ViT classifies images: no sequence in the batch to split."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, rows


def main(batch_size: int, **options: Any) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    samples = [
        {"pixel_values": torch.full((3, 16, 16), i / 12.0), "labels": torch.tensor(i % 3)}
        for i, row in enumerate(rows())
    ]
    module = Tuned(
        ViTForImageClassification(
            ViTConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=16,
                patch_size=4,
                num_labels=3,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    )
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
