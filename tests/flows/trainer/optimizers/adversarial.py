"""Manual optimization of a model and a critic of its pooled states, a layer of the module itself: the critic steps first."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp.reductions import sequence_mean
from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.critic = nn.Linear(32, 1)
        self.automatic_optimization = False

    def judged(self, hidden: Tensor, batch: Any) -> Tensor:
        wanted = sequence_mean((batch["input_ids"] > 10).to(hidden)[..., None])
        return (self.critic(sequence_mean(hidden)) - wanted).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        model, critic = self.optimizers()
        hidden = self.model.model(batch["input_ids"]).last_hidden_state
        critic_loss = self.judged(hidden.detach(), batch)
        critic.zero_grad()
        self.manual_backward(critic_loss)
        critic.step()
        logits = self.model.lm_head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        model.zero_grad()
        self.manual_backward(loss + self.judged(hidden, batch))
        model.step()
        self.log("train_loss", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2), torch.optim.SGD(self.critic.parameters(), lr=0.1)


def main(batch_size: int, **options: Any) -> Any:
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(), batch_size=batch_size))
    return module
