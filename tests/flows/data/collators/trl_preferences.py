"""TRL's collator for preferences: prompts with the chosen answers, then with the rejected ones; a step of DPO."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp.reductions import sequence_sum, shift
from tests.flows.tiny import Tuned, llama, texts, tokenizer


def log_probability(model: nn.Module, batch: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets, completed = shift(batch["input_ids"], 1, 0), shift(batch["completion_mask"], 1, 0)
    losses = F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none")
    return sequence_sum(-losses, completed)


class DPO(Tuned):
    def __init__(self) -> None:
        super().__init__(llama())
        self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            old = log_probability(self.reference, batch)
        chosen, rejected = (log_probability(self.model, batch) - old).chunk(2)
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        self.log("train_loss", loss, sync_dist=True)
        return loss


def main(batch_size: int, **options: Any) -> pl.LightningModule:
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    words = tokenizer()
    answers = zip(texts(12, 5, 8, seed=2), texts(12), texts(12, seed=1), strict=True)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    pairs = [dict(zip(names, (words(text)["input_ids"] for text in each), strict=True)) for each in answers]
    loader = DataLoader(pairs, batch_size=batch_size, collate_fn=DataCollatorForPreference(pad_token_id=0))
    module = DPO()
    pl.Trainer(max_epochs=1, **options).fit(module, loader)
    return module
