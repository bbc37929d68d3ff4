"""What runs in the ranks: each sample's gradient, by torch.func and row by row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, _full, quiet_trainer, tiny_llama


class PerSample(Plain):
    def __init__(self, how: str) -> None:
        super().__init__(tiny_llama)
        self.how, self.head = how, nn.Linear(61, 5)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        if self.how == "of a head":
            norms = self.by_transform(self.head, logits.detach().mean(1), batch["input_ids"][:, 0] % 5)
        elif self.how == "of a model":
            norms = self.by_transform(self.model, batch["input_ids"], batch["shift_labels"], batch["position_ids"])
        else:
            each = F.cross_entropy(logits.transpose(1, 2), batch["shift_labels"], reduction="none").mean(1)
            weights = [*self.model.parameters()]
            found = [torch.autograd.grad(one, weights, retain_graph=True) for one in each]
            norms = torch.stack([sum(g.square().sum() for g in of_row) for of_row in found]).sqrt()  # type: ignore[arg-type]
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten()) * (1 / norms).mean().detach()

    def by_transform(self, module: nn.Module, *rows: Tensor) -> Tensor:
        def loss(weights: dict[str, Tensor], x: Tensor, target: Tensor, *others: Tensor) -> Tensor:
            found = torch.func.functional_call(module, weights, (x[None], *(one[None] for one in others)))
            return F.cross_entropy(found.flatten(0, -2), target.flatten())

        weights = {name: each.detach() for name, each in module.named_parameters()}
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, *(0 for _ in rows)))(weights, *rows)
        norms: Any = sum(each.flatten(1).square().sum(1) for each in found.values())
        return norms.sqrt()


def fit(how: str, world: int) -> dict[str, Any]:
    """Return what was refused, and the weights."""
    torch.manual_seed(3)
    module, error = PerSample(how), ""
    strategy = {"ring_size": 2, "global_view": "auto"} if world > 1 else {}
    try:
        quiet_trainer(world, strategy=strategy, max_steps=2).fit(module, DataLoader(TokenDataset(4), batch_size=2))
    except SequenceParallelError as refusal:
        error = str(refusal)
    return {"error": error, "weights": {name: _full(each.detach()).clone() for name, each in module.named_parameters()}}
