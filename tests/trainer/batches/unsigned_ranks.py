"""Tokens in dtypes without a sign, as files have them: what each rank runs in test_unsigned.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.models import Llama, LlamaConfig
from tests.trainer.tiny import Plain, _full, plain_trainer, quiet_trainer

WORDS = 200  # 156, of which -100 is the byte, is one


def tiny() -> Llama:
    return Llama(LlamaConfig(vocab_size=WORDS, dim=32, num_layers=1, num_heads=4, num_kv_heads=2, hidden_dim=48))


class Unsigned(Plain):
    """Hands targets to the loss as they are, which takes bytes, or as int64."""

    as_they_are = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"].long(), batch["position_ids"])
        targets = batch["shift_labels"]
        loss = F.cross_entropy(logits.flatten(0, 1), (targets if self.as_they_are else targets.long()).flatten())
        self.losses.append(float(loss.detach()))
        return loss


def batches(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Of 32 tokens, then of 31, which two ranks do not divide."""
    found = []
    for seed, length in enumerate((32, 31, 31)):
        ids = torch.randint(0, WORDS, (2, length + 1), generator=torch.Generator().manual_seed(seed)).to(dtype)
        places = torch.arange(length).repeat(2, 1)
        found.append({"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:], "position_ids": places})
    return found


def fit(dtype: torch.dtype, as_they_are: bool, strategy: dict[str, Any]) -> list[Any]:
    """Return losses and weights under plain Lightning, and under ours."""
    found = []
    for trainer in (plain_trainer(max_epochs=1), quiet_trainer(2, strategy=strategy)):
        torch.manual_seed(0)
        module = Unsigned(tiny)
        module.as_they_are = as_they_are
        trainer.fit(module, DataLoader(batches(dtype), batch_size=None))  # type: ignore[arg-type]
        weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
        found.append((list(module.losses), weights))
    return found
