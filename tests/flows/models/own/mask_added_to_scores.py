"""A mask of numbers that is added to the scores, for rows of which some are padded to a fixed length and others are not."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.models.own.nanogpt_by_hand import GPT
from tests.flows.tiny import Tuned, rows


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y = (q @ k.mT / 8**0.5 + self.mask).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Masked(GPT):
    def __init__(self) -> None:
        super().__init__()
        for block in self.h:
            block.attention = Attention()

    def forward(self, idx: Tensor, padding: Tensor) -> Tensor:  # type: ignore[override]
        length = idx.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=idx.device).tril() & padding[:, None, None].bool()
        lowest = torch.finfo(self.lm_head.weight.dtype).min
        for block in self.h:
            block.attention.mask = torch.zeros(seen.shape, dtype=self.lm_head.weight.dtype).masked_fill(~seen, lowest)
        return super().forward(idx, torch.arange(length, device=idx.device))


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"], batch["attention_mask"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> Any:
    samples = []
    for number, row in enumerate(rows()):
        mask = torch.ones(18, dtype=torch.int64)
        mask[12 if number % 2 else 18 :] = 0
        samples.append(
            {**row, "attention_mask": mask, "shift_labels": row["shift_labels"].masked_fill(mask == 0, -100)}
        )
    module = Module(Masked())
    # With two data-parallel groups each has one row of a batch: a group's is padded, the other's is not.
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size // 2))
    return module
