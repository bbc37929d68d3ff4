"""Sharpness-aware minimization: an optimizer around another, two backwards a step, a norm over all gradients"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_sp.reductions import shift
from tests.flows.tiny import Tuned, llama, rows


class SAM(torch.optim.Optimizer):
    def __init__(self, params: Any, base_optimizer: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        scale = self.param_groups[0]["rho"] / (self._grad_norm() + 1e-12)
        for parameter in self._parameters():
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(parameter.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self._parameters():
            parameter.data = self.state[parameter]["old"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()
        return loss

    def _parameters(self) -> Any:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _grad_norm(self) -> Any:
        return torch.norm(torch.stack([p.grad.norm(p=2) for p in self._parameters()]), p=2)


class Module(Tuned):
    # The model's own loss is in float32: what that rounds, two steps along one gradient enlarge.
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels = shift(batch["labels"], 1, -100)
        logits = self.model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return SAM(self.parameters(), torch.optim.AdamW, lr=0.01)


def main(batch_size: int, **options: Any) -> Any:
    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module, {}
