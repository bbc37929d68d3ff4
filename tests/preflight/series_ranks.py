"""What each rank runs in test_series.py: a codec by convolutions of sounds, whose sequence is the last dim."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import _full, quiet_trainer


class Codec(pl.LightningModule):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(channels, 16, 5, padding=2)
        self.decoder = nn.Conv1d(16, channels, 3, padding=1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        sounds = batch["audio"]
        return F.mse_loss(self.decoder(F.gelu(self.encoder(sounds))), sounds)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(world: int, channels: int, strategy: dict[str, Any]) -> dict[str, Tensor] | str:
    """Return the weights of three steps, whole, or why they are refused."""
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    rows = [{"audio": torch.randn(channels, 32, generator=g, dtype=torch.float64)} for _ in range(6)]
    module = Codec(channels)
    try:
        quiet_trainer(world, strategy=strategy).fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    except SequenceParallelError as error:
        return str(error)
    return {name: _full(value.detach()) for name, value in module.named_parameters()}
