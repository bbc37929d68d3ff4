"""Norms as numbers: an optimizer that scales each weight's step by `.item()` of two norms (LAMB's trust ratio), a gradient's norm logged."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class TrustRatio(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                weight, gradient = parameter.norm().item(), float(parameter.grad.norm())
                ratio = weight / gradient if weight > 0 and gradient > 0 else 1.0
                parameter.add_(parameter.grad, alpha=-group["lr"] * ratio)
        return loss


class Module(Tuned):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("grad_norm", sum(p.grad.norm().item() ** 2 for p in self.parameters()) ** 0.5)  # type: ignore[union-attr, misc]
        if max(p.grad.abs().max() for p in self.parameters()) > 0.05:  # type: ignore[union-attr]
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return TrustRatio(self.parameters())


def main(batch_size: int, **options: Any) -> Any:
    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    module = Module(llama())
    trainer = pl.Trainer(max_epochs=1, **options)
    trainer.fit(module, DataLoader(samples, batch_size=batch_size))
    return module, {"grad_norm": trainer.callback_metrics["grad_norm"]}
