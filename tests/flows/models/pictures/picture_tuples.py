"""Pictures and classes as torchvision gives them, a tuple: a small network of convolutions, accuracy by torchmetrics."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 8, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(8, 3),
        )  # fmt: skip
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, classes = batch
        loss = F.cross_entropy(self.model(images), classes, label_smoothing=0.1)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, classes = batch
        logits = self.model(images)
        self.accuracy(logits, classes)
        self.log("accuracy", self.accuracy)
        self.log("right", logits.argmax(1).eq(classes).sum().double(), reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(batch_size: int, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(12, 3, 9, 9, generator=generator), torch.arange(12) % 3)
    module, loader = Module(), DataLoader(samples, batch_size=batch_size)
    trainer = pl.Trainer(max_epochs=1, **options)
    trainer.fit(module, loader, loader)
    logits = trainer.predict(module, DataLoader(samples, batch_size=batch_size, collate_fn=_images))
    return module, {"predicted": torch.cat(logits)} if logits else {}


def _images(rows: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([image for image, _ in rows])
