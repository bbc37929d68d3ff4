"""Tags whose order counts: a conditional random field by hand over ragged rows, and the best path in validation"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama().model)
        self.tags, self.next = nn.Linear(32, 4), nn.Parameter(0.1 * torch.randn(4, 4))

    def scores(self, batch: Any) -> Tensor:
        return self.tags(self.model(batch["input_ids"]).last_hidden_state)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores, tags, mask = self.scores(batch), batch["tags"], batch["attention_mask"].bool()
        row = torch.arange(len(tags))
        path, every = scores[row, 0, tags[:, 0]], scores[:, 0]
        for i in range(1, tags.shape[1]):
            path = path + (self.next[tags[:, i - 1], tags[:, i]] + scores[row, i, tags[:, i]]) * mask[:, i]
            on = torch.logsumexp(every[:, :, None] + self.next + scores[:, i][:, None], 1)
            every = torch.where(mask[:, i][:, None], on, every)
        loss = (every.logsumexp(1) - path).mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores, right = self.scores(batch), 0
        best, steps = scores[:, 0], []
        for i in range(1, scores.shape[1]):
            values, come_from = (best[:, :, None] + self.next).max(1)
            best = values + scores[:, i]
            steps.append(come_from)
        for r in range(len(scores)):
            path = [int(best[r].argmax())]
            for come_from in reversed(steps):
                path.insert(0, int(come_from[r, path[0]]))
            right += int((torch.tensor(path) == batch["tags"][r]).sum())
        self.log("right", right / batch["tags"].numel(), sync_dist=True)


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    drawn = torch.Generator().manual_seed(5)
    samples = []
    for i, row in enumerate(rows(length=11)):
        mask = (torch.arange(11) < 8 + i % 4).long()
        tags = torch.randint(4, (11,), generator=drawn)
        samples.append({"input_ids": row["input_ids"], "attention_mask": mask, "tags": tags})
    module = Module()
    loaders = DataLoader(samples, batch_size=batch_size), DataLoader(samples[:4], batch_size=batch_size)
    pl.Trainer(max_epochs=1, **options).fit(module, *loaders)
    return module
