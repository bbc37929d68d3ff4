"""DETR learns boxes, a list of dicts as its processor gives them: its backbone of convolutions has no attention to set"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned

NUM_BOXES = 3


def collate(samples: list[Any]) -> dict[str, Any]:
    return {
        "pixel_values": torch.stack([each["pixel_values"] for each in samples]),
        "labels": [each["labels"] for each in samples],
    }


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.model(pixel_values=batch["pixel_values"])
        # The n-th query is for the n-th box; transformers' own matcher wants scipy.
        boxes = torch.stack([each["boxes"] for each in batch["labels"]])
        classes = torch.stack([each["class_labels"] for each in batch["labels"]])
        loss = F.cross_entropy(found.logits[:, :NUM_BOXES].flatten(0, 1), classes.flatten())
        loss = loss + F.l1_loss(found.pred_boxes[:, :NUM_BOXES], boxes.to(found.pred_boxes))
        self.log("train_loss", loss, sync_dist=True)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=5, num_labels=3, dropout=0.0, auxiliary_loss=False,
    )  # fmt: skip
    drawn = torch.Generator().manual_seed(0)
    samples = [
        {
            "pixel_values": torch.randn(3, 32, 32, generator=drawn),
            "labels": {
                "class_labels": torch.randint(0, 3, (NUM_BOXES,), generator=drawn),
                "boxes": torch.rand(NUM_BOXES, 4, generator=drawn) / 2 + 0.2,
            },
        }
        for _ in range(12)
    ]
    module = Module(DetrForObjectDetection(config))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size, collate_fn=collate))
    return module
