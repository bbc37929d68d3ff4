"""Penalties on the weights in the loss: L2 of all, L1 of the embedding, and a projection that is to stay orthogonal"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import Tuned, llama, rows


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        weight = self.model.model.layers[0].self_attn.o_proj.weight
        apart = weight @ weight.T - torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        l2 = sum(p.pow(2).sum() for p in self.parameters())
        penalty = 0.01 * l2 + 0.001 * self.model.model.embed_tokens.weight.abs().sum() + 0.01 * apart.square().sum()
        self.log("norm", sum(p.detach().pow(2).sum() for p in self.parameters()) ** 0.5)
        self.log_dict({"loss": loss, "penalty": penalty})
        return loss + penalty


def main(batch_size: int, **options: Any) -> Any:
    module = Module(llama())
    trainer = pl.Trainer(max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=1.0, **options)
    trainer.fit(module, DataLoader(rows(16), batch_size=batch_size))
    return module, {}
