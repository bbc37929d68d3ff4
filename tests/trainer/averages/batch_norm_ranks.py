"""What each rank runs in test_batch_norm.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.lightning_ranks import fitted, trainer_of
from tests.trainer.tiny import Plain, tiny_gpt


class Stem(Plain):
    """Features normed over rows and tokens before attention; or, of batches without a sequence, over rows."""

    def __init__(self, has_tokens: bool) -> None:
        super().__init__(tiny_gpt)
        torch.manual_seed(1)
        self.has_tokens = has_tokens
        self.conv, self.norm, self.qkv = nn.Conv1d(6, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Linear(8, 24)
        self.out = nn.Linear(8, 1)

    def configure_model(self) -> None:
        return

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.has_tokens:
            x = self.norm(self.conv(batch["features"].transpose(1, 2))).relu().transpose(1, 2)
            q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
            x = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        else:
            x = self.norm(self.conv(batch["pixel_values"]).mean(-1)).relu()
        loss = F.mse_loss(self.out(x).squeeze(-1), batch["targets"])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def run(
    strategy: dict[str, Any] | None, world: int, micro: int, has_tokens: bool, length: int = 13, synced: bool = True
) -> dict[str, Any]:
    """Fit two steps of a global batch of four; return weights and statistics, or the refusal."""
    drawn = torch.Generator().manual_seed(2)
    shapes = ((length, 6), (length,)) if has_tokens else ((6, length), ())
    names = ("features" if has_tokens else "pixel_values", "targets")
    rows = [
        {n: torch.randn(shape, generator=drawn, dtype=torch.float64) for n, shape in zip(names, shapes, strict=True)}
        for _ in range(8)
    ]
    module = Stem(has_tokens)
    trainer = trainer_of(strategy, world, sync_batchnorm=synced and strategy is not None)
    try:
        trainer.fit(module, DataLoader(rows, batch_size=micro))  # type: ignore[arg-type]
    except SequenceParallelError as error:
        return {"error": str(error)}
    return {**fitted(trainer, module), "buffers": {n: b.clone() for n, b in module.named_buffers()}}
