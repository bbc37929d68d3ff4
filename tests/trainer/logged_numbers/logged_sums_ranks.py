"""What each rank runs in test_logged_sums.py: a fit that logs sums of a rank's own tokens and of what ranks have together."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama

NAMES = ("kilotokens", "rows", "loss", "counted")
SUM: dict[str, Any] = dict(reduce_fx="sum", sync_dist=True, on_step=False, on_epoch=True)


class Sums(Plain):
    """Of equal shards: a rank's tokens in thousands are a fraction, and the same on all ranks."""

    # 2: every second batch logs them, and the others another number; 3, 5: a hook logs a whole number, and adds counts up by hand; 3, 4: losses
    each = 1

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.each in (3, 4):  # in place with Lightning, and so of what the step returns
            self.by_hand.append(float(self.trainer.strategy.reduce(loss.detach(), reduce_op="sum")))
        if self.each != 2 or batch_idx % 2 == 0:
            self.log("kilotokens", batch["input_ids"].numel() / 1000, **SUM)
            self.log("rows", float(len(batch["input_ids"])), **SUM)
        else:
            self.log("others", 1.0, **SUM)
        self.log("loss", loss.detach(), **SUM)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.each in (3, 5):
            self.log("counted", float((batch["input_ids"] > 30).sum()), **SUM)
            counts = torch.bincount(batch["input_ids"].flatten(), minlength=100)
            self.by_hand += self.trainer.strategy.reduce(counts, reduce_op="sum").tolist()


def fit(world: int, strategy: dict[str, Any] | None, each: int = 1) -> tuple[dict[str, Any], list[str]]:
    """Return the logged sums, those by hand, and what was said of them."""
    torch.manual_seed(0)
    module = Sums(tiny_llama)
    module.each, module.by_hand = each, []
    trainer = quiet_trainer(world, strategy=strategy) if strategy else quiet_trainer(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(TokenDataset(12 if each == 2 else 4), batch_size=2))
    said = [str(each.message) for each in caught if "no trial has told" in str(each.message)]
    numbers = {name: float(trainer.callback_metrics[name]) for name in NAMES[: 4 if each in (3, 5) else 3]}
    return {**numbers, "by hand": module.by_hand, "losses": module.losses}, said
