"""DPO, chosen and rejected answers in entries of their own, padded to different lengths."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp.reductions import batch_mean
from tests.flows.tiny import Tuned, llama, texts, tokenizer


def log_probability(model: nn.Module, batch: Any, which: str) -> Tensor:
    logits = model(input_ids=batch[f"{which}_input_ids"], attention_mask=batch[f"{which}_attention_mask"]).logits
    labels = batch[f"{which}_labels"][:, 1:]
    kept = labels != -100
    words = logits[:, :-1].log_softmax(-1).gather(2, labels.masked_fill(~kept, 0).unsqueeze(2)).squeeze(2)
    return (words * kept).sum(-1)


class DPO(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            old = [log_probability(self.reference, batch, which) for which in ("chosen", "rejected")]
        new = [log_probability(self.model, batch, which) for which in ("chosen", "rejected")]
        loss = batch_mean(-F.logsigmoid(0.1 * ((new[0] - old[0]) - (new[1] - old[1]))))
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    words = tokenizer()

    def collate(pairs: list[Any]) -> Any:
        batch = {}
        for number, which in enumerate(("chosen", "rejected")):
            rows = words.pad([{"input_ids": words(pair[number])["input_ids"]} for pair in pairs], return_tensors="pt")
            labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
            batch |= {f"{which}_{name}": value for name, value in {**rows, "labels": labels}.items()}
        return batch

    pairs = list(zip(texts(12), texts(12, shortest=12, longest=31, seed=1), strict=True))
    module = DPO()
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(pairs, batch_size=batch_size, collate_fn=collate))
    return module
