"""What each rank runs in test_unsharded.py: a reader of text and two pictures a row, whose tower drops; returns plain values."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.preflight.differences.other_tokens_ranks import Attention
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, quiet_trainer

PATCHES = 9


def keep(tensor: Tensor, folder: str) -> None:
    """Keep what a call has made in a file: what a recomputation writes to lists is taken back."""
    torch.save(tensor.detach().clone(), f"{folder}/{len(os.listdir(folder)):04}")


class Block(nn.Module):
    """Patches that attend to each other, with dropout whose mask is kept at once: a recomputation may end before the block does."""

    def __init__(self, attention_dropout: float) -> None:
        super().__init__()
        self.attention, self.drop, self.out = Attention(attention_dropout), nn.Dropout(0.5), nn.Linear(16, 16)
        self.folder = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.attention(x, x))
        keep(y, self.folder)
        return x + self.out(y)


class Tower(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layers = how, nn.ModuleList(Block(0.1) for _ in range(2))

    def forward(self, pixels: Tensor) -> Tensor:
        for layer in self.layers:
            inside = self.how == "inside"
            pixels = checkpoint(layer, pixels, use_reentrant=False) if inside else layer(pixels)
        return pixels


class Reader(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embedding, self.positions, self.head = nn.Embedding(VOCAB, 16), nn.Embedding(128, 16), nn.Linear(16, VOCAB)
        self.tower, self.attention = Tower(how), Attention()

    def forward(self, ids: Tensor, positions: Tensor, pixels: Tensor) -> Tensor:
        x = F.dropout(self.embedding(ids) + self.positions(positions), 0.1, self.training)
        x = x + self.attention(x, x, True)
        for picture in pixels.requires_grad_().chunk(2, 1):
            image = (
                checkpoint(self.tower, picture, use_reentrant=False) if self.how == "around" else self.tower(picture)
            )
            x = x + image.mean(1, keepdim=True)
        return self.head(x)


class Model(Plain):
    def __init__(self, how: str, folder: str) -> None:
        super().__init__(None)
        torch.manual_seed(3)
        self.folder, self.folders = folder, list[str]()
        self.own: list[float] = []
        self.model = Reader(how)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        folder = tempfile.mkdtemp(dir=self.folder)
        for layer in self.model.tower.layers:
            layer.folder = folder
        self.folders.append(folder)
        logits = self.model(batch["input_ids"], batch["position_ids"], batch["pixels"])
        self.own.append(float(torch.rand(())))
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())


def trained(strategy: dict[str, Any], how: str, rows: int) -> dict[str, Any]:
    """Fit two steps; return what each block's dropout left of its input in them, recomputed ones too, and what the rank drew for itself."""
    data, g = TokenDataset(2, 96), torch.Generator().manual_seed(2)
    pixels = torch.randn(2 * PATCHES, 16, generator=g, dtype=torch.float64)
    # The same pictures in each row and step: what differs is drawn.
    samples = [{**data[0], "pixels": pixels} for _ in range(4)]
    trainer = quiet_trainer(torch.distributed.get_world_size(), strategy=strategy, max_steps=2, max_epochs=2)
    with tempfile.TemporaryDirectory() as folder:
        module = Model(how, folder)
        trainer.fit(module, DataLoader(samples, batch_size=rows))  # type: ignore[arg-type]
        drawn = [[torch.load(each) for each in sorted(Path(step).iterdir())] for step in module.folders[-2:]]
    return {"drawn": drawn, "own": module.own[-2:]}
