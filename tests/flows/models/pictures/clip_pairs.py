"""CLIP tells which text belongs to which picture of the batch, with a temperature that is a single number"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned

# Each data-parallel group tells its own rows apart, as with DDP: another number than one device's.
LAYOUTS = ["ulysses 2", "ring 2"]


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch, return_loss=True).loss
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import CLIPConfig, CLIPModel

    part = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, projection_dim=16)
    config = CLIPConfig(
        text_config=dict(**part, vocab_size=VOCABULARY, max_position_embeddings=32, eos_token_id=2, pad_token_id=0, bos_token_id=1),
        vision_config=dict(**part, image_size=16, patch_size=8),
        projection_dim=16,
    )  # fmt: skip
    drawn = torch.Generator().manual_seed(0)
    ids, pictures = torch.randint(6, VOCABULARY, (12, 18), generator=drawn), torch.randn(12, 3, 16, 16, generator=drawn)
    ids[:, -1] = 2
    samples = [{"input_ids": ids[i], "pixel_values": pictures[i]} for i in range(12)]
    module = Module(CLIPModel(config))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
