"""A parallel scan of the user's own, an autograd.Function as ports of Mamba have it, with a learned decay and a mean over all tokens."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY

TOKENS = 16


def scan_in_place(a: Tensor, x: Tensor) -> None:
    """h[t] = a[t] h[t - 1] + x[t], of a number of tokens that is a power of two."""
    rows, tokens, width = x.shape
    if tokens == 1:
        return
    a_of_two, x_of_two = (each.view(rows, tokens // 2, 2, width) for each in (a, x))
    x_of_two[:, :, 1].add_(a_of_two[:, :, 1].mul(x_of_two[:, :, 0]))
    a_of_two[:, :, 1].mul_(a_of_two[:, :, 0])
    scan_in_place(a_of_two[:, :, 1], x_of_two[:, :, 1])
    x_of_two[:, 1:, 0].add_(a_of_two[:, 1:, 0].mul(x_of_two[:, :-1, 1]))
    a_of_two[:, 1:, 0].mul_(a_of_two[:, :-1, 1])


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decay: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.clone()
        scan_in_place(decay.sigmoid().expand_as(x).clone(), h)
        ctx.save_for_backward(decay, h)
        return h, h.mean(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        decay, h = ctx.saved_tensors
        a = decay.sigmoid()
        g = (grads[0] + grads[1][:, None] / h.shape[1]).flip(1).clone()
        scan_in_place(a.expand_as(h).clone(), g)
        g = g.flip(1)
        before = F.pad(h[:, :-1], (0, 0, 1, 0))
        return (before * g).sum((0, 1)) * a * (1 - a), g


scan = Scan.apply


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16), nn.Linear(16, VOCABULARY)
        self.layer = nn.Module()
        self.layer.decay = nn.Parameter(torch.linspace(-1, 2, 16))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch["input_ids"])
        h, mean = scan(self.layer.decay * 1.5, self.mix(x))
        logits = self.head(x + h.tanh() + mean[:, None])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main(batch_size: int, **options: Any) -> Any:
    module = Module()
    ids = torch.randint(1, VOCABULARY, (12, TOKENS), generator=torch.Generator().manual_seed(0))
    pl.Trainer(max_epochs=1, **options).fit(
        module, DataLoader([{"input_ids": each} for each in ids], batch_size=batch_size)
    )
    return module
