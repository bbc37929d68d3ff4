"""What each rank runs in test_agreed_update.py: fits in which one rank steps by another number."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


class Uneven(Plain):
    """Changes a number of its optimizer's, on rank 1 alone or on all, in the second step."""

    where, name, on_all = "", "lr", False

    def configure_model(self) -> None:
        super().configure_model()
        if self.where == "dropout":
            self.model.dropout = torch.nn.Dropout(0.1)

    def configure_optimizers(self) -> Any:
        weights = list(self.parameters())
        if self.where == "other weights" and self.global_rank == 1:
            weights = weights[::-1]
        if self.where in ("other weights", "another order"):
            order = -1 if self.where == "another order" and self.global_rank == 1 else 1
            return torch.optim.AdamW([{"params": weights[:6][::order]}, {"params": weights[6:], "lr": 0.1}], lr=self.lr)
        return torch.optim.AdamW(weights, lr=self.lr)

    def change(self, where: str) -> None:
        if where == self.where and self.global_step >= 1 and (self.on_all or self.global_rank == 1):
            for group in self.optimizers().param_groups:  # type: ignore[union-attr]
                group[self.name] = 0.002
        if where == "on_train_batch_start" and self.global_step >= 1 and self.global_rank == 1:
            if self.where == "clipping":
                self.trainer.gradient_clip_val = 0.5
            if self.where == "dropout":
                self.model.dropout.p = 0.5
            if self.where == "eval":
                self.model.eval()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.change("on_train_batch_start")

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        self.change("training_step")
        loss = super().training_step(batch, batch_idx)
        if self.where == "by hand":
            self.automatic_optimization = False
            return self.by_hand(loss)
        return loss

    def by_hand(self, loss: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.change("by hand")
        self.manual_backward(loss)
        optimizer.step()


def fit(where: str, world: int, strategy: dict[str, Any], on_all: bool = False) -> dict[str, Any]:
    """Train two steps; return what was said, and whether the weights of the first step are still there."""
    torch.manual_seed(0)
    module: Any = Uneven(tiny_llama)
    module.where, module.on_all = where, on_all
    module.automatic_optimization = where != "by hand"
    before: list[torch.Tensor] = []

    def keep(*_: Any) -> None:
        if where == "accumulation" and module.global_rank == 1:
            module.trainer.accumulate_grad_batches = 4
        before[:] = [each.detach().to_local().clone() for each in module.parameters()]  # type: ignore[attr-defined]

    module.on_train_batch_end = keep
    trainer = quiet_trainer(world, strategy=strategy, precision="64-true", max_steps=2)
    said = ""
    try:
        trainer.fit(module, DataLoader(TokenDataset(8), batch_size=2))
    except SequenceParallelError as error:
        said = str(error)
    now = [each.detach().to_local() for each in module.parameters()]
    return {
        "said": said,
        "untouched": all(map(torch.equal, before, now)),
        "steps": trainer.global_step,
    }
