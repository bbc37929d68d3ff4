"""Rows of one token, and losses of them as users write them: what each rank runs in test_one_token.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, _full, tiny_gpt

LOSSES: dict[str, Any] = {
    "tokens": lambda logits, b: F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten()),
    "viewed": lambda logits, b: F.cross_entropy(logits.view(-1, VOCAB), b["labels"].view(-1)),
    "transposed": lambda logits, b: F.cross_entropy(logits.transpose(1, 2), b["labels"]),
    "last": lambda logits, b: F.cross_entropy(logits[:, -1], b["labels"][:, 0]),
    "first, of rows": lambda logits, b: F.cross_entropy(logits[:, 0], b["classes"]),
    "mean, of rows": lambda logits, b: F.cross_entropy(logits.mean(1), b["classes"]),
    "squeezed": lambda logits, b: F.cross_entropy(logits.squeeze(1), b["labels"].squeeze(1)),
    "numbers": lambda logits, b: F.mse_loss(logits.mean(-1), b["labels"].double()),
    "number of a row": lambda logits, b: F.mse_loss(logits[:, -1, 0], b["value"]),
    "gathered": lambda logits, b: -logits.log_softmax(-1).gather(-1, b["labels"].unsqueeze(-1)).mean(),
}


class OfOneToken(Plain):
    def __init__(self, loss: str) -> None:
        super().__init__(tiny_gpt)
        self.loss = LOSSES[loss]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.logits(batch), batch)
        self.losses.append(float(loss.detach()))
        return loss


def runs(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run(**case) for case in cases]


def run(loss: str, strategy: dict[str, Any] | None, world: int, length: int = 1) -> dict[str, Any]:
    """Fit under plain Lightning (None) or ours; losses and weights, or the refusal."""
    torch.manual_seed(3)
    module, data = OfOneToken(loss), TokenDataset(8, length)
    rows = [
        {
            "input_ids": data.tokens[i, :-1], "position_ids": torch.arange(length), "labels": data.tokens[i, 1:],
            "classes": torch.tensor(i), "value": torch.tensor(0.1 * i),
        }
        for i in range(8)
    ]  # fmt: skip
    trainer = trainer_of(strategy, world)
    try:
        trainer.fit(module, DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    except SequenceParallelError as error:
        return {"error": str(error)}
    weights = {n: _full(p.detach()).clone() for n, p in module.named_parameters()}
    return {"error": "", "losses": module.losses, "weights": weights}
