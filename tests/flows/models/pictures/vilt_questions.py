"""ViLT answers questions about pictures: texts of which one data-parallel group's are padded and the other's are not"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.flows.tiny import VOCABULARY, Tuned


class Module(Tuned):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, sync_dist=True)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import ViltConfig, ViltForQuestionAnswering

    config = ViltConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=64, num_labels=3,
    )  # fmt: skip
    drawn = torch.Generator().manual_seed(0)
    ids, pictures = torch.randint(6, VOCABULARY, (12, 18), generator=drawn), torch.randn(12, 3, 16, 16, generator=drawn)
    masks = torch.ones(12, 18, dtype=torch.long)
    masks[3::4, -5:] = 0  # one of the four rows of a step: of one group
    samples = [
        {"input_ids": ids[i], "attention_mask": masks[i], "pixel_values": pictures[i], "labels": torch.eye(3)[i % 3].double()}
        for i in range(12)
    ]  # fmt: skip
    module = Module(ViltForQuestionAnswering(config))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(samples, batch_size=batch_size))
    return module
