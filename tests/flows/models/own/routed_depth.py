"""Mixture of depths: a router chooses a quarter of a row's tokens, and a layer sees those alone and adds to them"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.router = nn.Linear(32, 1)
        self.layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states = self.model.model(batch["input_ids"]).last_hidden_state
        scores = self.router(states).squeeze(-1)
        chosen = scores.topk(states.shape[1] // 4, dim=1).indices.sort(1).values
        places = chosen[..., None].expand(-1, -1, 32)
        seen = torch.ones(chosen.shape[1], chosen.shape[1], dtype=torch.bool).triu(1)
        more = self.layer(states.gather(1, places), src_mask=seen) * scores.gather(1, chosen).sigmoid()[..., None]
        logits = self.model.lm_head(states.scatter_add(1, places, more))
        choice = F.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores).scatter(1, chosen, 1.0))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten()) + 0.1 * choice
        self.log("train_loss", loss, sync_dist=True)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    module = Module()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(rows(length=17), batch_size=batch_size))
    return module
