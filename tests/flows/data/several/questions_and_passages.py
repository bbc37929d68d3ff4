"""Short questions, each with a right and a wrong passage that are longer: a margin between states pooled by a mean."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.reductions import batch_mean
from tests.flows.tiny import Tuned, bert_sizes, texts, tokenizer


class Module(Tuned):
    def embed(self, batch: Any, which: str) -> Tensor:
        mask = batch[f"{which}_attention_mask"]
        states = self.model(batch[f"{which}_input_ids"], attention_mask=mask).last_hidden_state
        return F.normalize((states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        questions, passages = self.embed(batch, "question"), self.embed(batch, "passage")
        right, wrong = ((questions * passages[start::2]).sum(-1) for start in (0, 1))
        loss = batch_mean(F.relu(1 + wrong - right))
        self.log("train_loss", loss)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from transformers import BertConfig, BertModel

    words = tokenizer()

    def collate(pairs: list[Any]) -> Any:
        batch = {}
        for which, found in (
            ("question", [pair[0] for pair in pairs]),
            ("passage", [x for pair in pairs for x in pair[1:]]),
        ):
            rows = words.pad([{"input_ids": words(text)["input_ids"]} for text in found], return_tensors="pt")
            batch |= {f"{which}_{name}": value for name, value in rows.items()}
        return batch

    passages = texts(24, shortest=12, longest=31, seed=1)
    pairs = list(zip(texts(12, shortest=3, longest=7), passages[::2], passages[1::2], strict=True))
    module = Module(BertModel(BertConfig(**bert_sizes()), add_pooling_layer=False))
    pl.Trainer(max_epochs=1, **options).fit(module, DataLoader(pairs, batch_size=batch_size, collate_fn=collate))
    return module
