"""What runs in the ranks: a step whose backward clips gradients that are small yet, and one whose backward turns them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


class Clipped(torch.autograd.Function):
    """Hands on what it is given; a gradient's norm is at most 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        norm = gradient.norm()
        return gradient / norm if norm > 1 else gradient


class Reversed(Clipped):
    """Hands on what it is given; the gradient is reversed, as for adversarial domains."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.1 * gradient


class Backward(Plain):
    def __init__(self, kind: str, *, by_hand: bool = False) -> None:
        super().__init__(tiny_llama)
        self.kind = kind
        self.automatic_optimization = not by_hand

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss_of(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            self.manual_backward(self.loss_of(batch))
            for each in optimizer.param_groups[0]["params"]:
                each.grad.clamp_(-1e-4, 1e-4)
        optimizer.step()
        return None

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.logits(batch)
        if self.kind == "hook":
            logits.register_hook(lambda gradient: gradient / gradient.norm().clamp(min=1.0))
        elif self.kind == "largest":
            logits.register_hook(lambda gradient: gradient * torch.where(gradient.abs().max() > 1, 0.5, 1.0))
        else:
            logits = {"function": Clipped, "linear": Reversed}[self.kind].apply(logits)
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())


def fit(kind: str, *, by_hand: bool = False, view: Any = "auto") -> tuple[str, int]:
    """Return what was refused, and after how many steps."""
    torch.manual_seed(3)
    trainer = quiet_trainer(2, strategy={"ring_size": 2, "global_view": view}, max_steps=1, max_epochs=-1)
    try:
        trainer.fit(Backward(kind, by_hand=by_hand), DataLoader(TokenDataset(2), batch_size=2))
    except SequenceParallelError as refusal:
        return str(refusal), trainer.global_step
    return "", trainer.global_step
