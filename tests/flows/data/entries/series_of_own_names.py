"""Series under names of one's own, (rows, times, channels), forecast from patches as PatchTST does: nothing that is known as tokens"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(8, 16), nn.Parameter(torch.randn(7, 16))
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
        self.head = nn.Linear(7 * 16, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        series = batch["past_values"]
        mean, scale = series.mean(1, keepdim=True), series.std(1, keepdim=True) + 1e-5
        patches = ((series - mean) / scale).permute(0, 2, 1).unfold(-1, 8, 4).flatten(0, 1)
        found = self.head(self.layer(self.embed(patches) + self.places).flatten(1))
        forecast = found.view(len(series), -1, 6).permute(0, 2, 1) * scale + mean
        loss = F.mse_loss(forecast, batch["future_values"])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main(batch_size: int, **options: Any) -> Any:
    drawn = torch.Generator().manual_seed(7)
    series = [torch.randn(38, 3, generator=drawn, dtype=torch.float64) for _ in range(12)]
    module = Module()
    samples = [{"past_values": each[:32], "future_values": each[32:]} for each in series]
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
