"""GRPO on its own answers: the loss is 0, whatever tokens it sees; answers are as long as may be at first, and shorter later"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logp = self.model(batch["input_ids"]).logits.log_softmax(-1)
        logp = logp.gather(-1, batch["shift_labels"][..., None]).squeeze(-1)
        mask = batch["answer_mask"].to(logp)
        # Groups of two answers to a question, one of which is right.
        rewards = batch["reward"].view(-1, 2)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()[:, None]
        ratio = torch.exp(logp - logp.detach())
        each = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = ((each * mask).sum(1) / mask.sum(1)).mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    found = rows(length=20)
    ends = [20] * 4 + [12 + 3 * i % 9 for i in range(len(found) - 4)]
    samples = [
        {**row, "answer_mask": (torch.arange(20) < end).long(), "reward": torch.tensor(float(i % 2))}
        for i, (row, end) in enumerate(zip(found, ends, strict=True))
    ]
    module = Module(llama())
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
