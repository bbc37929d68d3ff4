"""What each rank runs in test_kept_by_blocks.py: a fit of blocks that count, draw from a generator of their own, and keep lists."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.parallelize import compilation
from lightning_sp.step import prepare
from tests.trainer.lightning_ranks import fitted, trainer_of
from tests.trainer.tiny import VOCAB, Plain, TokenDataset

WIDTH, HEADS = 16, 4
ROUTED: list[torch.Tensor] = []


class Block(nn.Module):
    """Attention, and an MLP under a scale that each call changes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.ones(WIDTH, dtype=torch.float64))
        self.generator = torch.Generator().manual_seed(5)
        self.norms: list[float] = []

    def scale(self) -> Any:
        if self.kind == "counter":
            self.calls += 1
            return 1 / self.calls
        if self.kind == "average":
            self.mean.data.mul_(0.5).add_(self.down.weight.detach().mean(), alpha=0.5)
            return self.mean
        if self.kind == "generator":
            return torch.rand(WIDTH, generator=self.generator, dtype=torch.float64)
        ROUTED.append(self.down.weight.square().sum())
        self.norms.append(1.0)
        return 1 / len(self.norms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).sin()) * self.scale()


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Module(Plain):
    """Adds what the blocks have left to its loss."""

    def __init__(self, kind: str) -> None:
        super().__init__(lambda: Model(kind))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        loss = loss + 0.1 * sum(ROUTED)
        ROUTED.clear()
        return loss


def run(kind: str, strategy: dict[str, Any] | None, world: int) -> dict[str, Any]:
    """Fit four steps; return losses, weights and what the blocks keep, or the refusal."""
    torch.compiler.reset()
    ROUTED.clear()
    module = Module(kind)
    trainer = trainer_of(strategy, world)
    backend = "aot_eager"
    with patch.object(prepare, "COMPILE_BACKEND", backend), patch.object(compilation, "COMPILE_BACKEND", backend):
        try:
            trainer.fit(module, DataLoader(TokenDataset(size=4), batch_size=1))  # type: ignore[arg-type]
        except SequenceParallelError as error:
            return {"error": str(error)}
    kept = [
        (float(each.calls), each.mean.tolist(), each.generator.get_state().tolist(), len(each.norms))
        for each in module.model.blocks
    ]
    return {**fitted(trainer, module), "kept": kept, "routed": len(ROUTED)}
