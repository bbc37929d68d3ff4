"""DPO with two forward passes, chosen and rejected answers padded apart, against a frozen reference."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp.reductions import batch_mean, sequence_sum
from tests.flows.tiny import Tuned, llama, texts, tokenizer


def log_probability(model: nn.Module, tokens: Any) -> Tensor:
    logits = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).logits
    losses = F.cross_entropy(logits.movedim(-1, 1), tokens["shift_labels"], reduction="none")
    return sequence_sum(-losses, tokens["shift_labels"] != -100)


class DPO(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            old = log_probability(self.reference, batch)
        new = log_probability(self.model, batch)
        ratio = new - old
        loss = batch_mean(-F.logsigmoid(0.1 * (ratio[::2] - ratio[1::2])))
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    words = tokenizer()

    def collate(pairs: list[Any]) -> Any:
        rows = words.pad(
            [{"input_ids": words(text)["input_ids"]} for pair in pairs for text in pair], return_tensors="pt"
        )
        shifted = rows["input_ids"].roll(-1, 1)
        shifted[:, -1] = 0
        return {**rows, "shift_labels": shifted.masked_fill(shifted == 0, -100)}

    pairs = list(zip(texts(12), texts(12, seed=1), strict=True))
    module = DPO()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(pairs, batch_size=batch_size, collate_fn=collate))
    return module
