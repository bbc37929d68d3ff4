"""A mixture of experts with its own balance loss: output_router_logits=True."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, rows, sizes


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.model(batch["input_ids"], labels=batch["input_ids"], output_router_logits=True)
        self.log("train_loss", found.loss)
        return found.loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import MixtralConfig, MixtralForCausalLM

    samples = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    options_of_experts = dict(num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager")
    module = Module(MixtralForCausalLM(MixtralConfig(**sizes(**options_of_experts))))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
