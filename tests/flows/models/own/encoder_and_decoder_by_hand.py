"""T5's encoder called by itself, its output pooled."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from lightning_sp.reductions import sequence_mean

        states = self.model.get_encoder()(batch["input_ids"]).last_hidden_state
        loss = F.mse_loss(sequence_mean(states).mean(-1), batch["wanted"])
        self.log("train_loss", loss, sync_dist=True)
        return loss


def main(batch_size: int, **options: Any) -> Any:
    from transformers import T5Config, T5EncoderModel

    samples = [{**row, "wanted": torch.tensor(i / 12)} for i, row in enumerate(rows())]
    config = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0)
    module = Module(T5EncoderModel(config))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
