"""What each rank runs in test_changed_masks.py: steps that hide other tokens than the batch's mask, from a later step on."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError, comm
from tests.trainer.tiny import HuggingFaceLlama, Plain, _full, plain_trainer, quiet_trainer

LENGTH = 16


class Hides(Plain):
    """Hides tokens of one kind from the third step on: by a mask of its own, or in the batch's own."""

    def __init__(self, in_place: bool) -> None:
        super().__init__(HuggingFaceLlama)
        self.in_place = in_place

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        hidden = (ids == 7) & (batch["step"][:, None] >= 2)
        if self.in_place:
            mask[hidden] = 0
        else:
            mask = mask.masked_fill(hidden, 0)
        logits = self.model.inner(input_ids=ids, attention_mask=mask).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        self.losses.append(float(loss.detach()))
        return loss


def fit(world: int, strategy: dict[str, Any] | None, in_place: bool) -> tuple[str, list[float], dict[str, Tensor]]:
    """Return what a fit is refused with, its losses and its weights."""
    torch.manual_seed(3)
    ids = torch.randint(8, 60, (8, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    ids[:, [2, 11]] = 7
    # Changed in place is a mask that hides something already; one that hides nothing is what tokenizers give for rows of one length.
    shown = torch.arange(LENGTH) < (LENGTH - 3 if in_place else LENGTH)
    rows = [
        {
            "input_ids": row[:-1],
            "attention_mask": shown.long(),
            "shift_labels": row[1:].masked_fill(~shown, -100),
            "step": torch.tensor(i // 2),
        }
        for i, row in enumerate(ids)
    ]
    module = Hides(in_place)
    trainer = plain_trainer(max_epochs=1) if strategy is None else quiet_trainer(world, strategy=strategy)
    try:
        trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    except SequenceParallelError as error:
        return str(error), module.losses, {}
    return "", module.losses, {name: _full(each.detach()).clone() for name, each in module.named_parameters()}


class Untouched(Hides):
    """Hands the model the batch's own mask, and counts what its forwards ask of other ranks."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with mock.patch.object(comm, "agree", wraps=comm.agree) as agree:
            logits = self.model.inner(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        self.losses.append(float(agree.call_count))
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())


def asked(hides: bool) -> list[float]:
    """Return how often the forward of each step asks other ranks, of masks that hide padding, or nothing."""
    rows = [
        {
            "input_ids": torch.arange(8, 8 + LENGTH) + i,
            "attention_mask": (torch.arange(LENGTH) < (LENGTH - 3 if hides else LENGTH)).long(),
            "shift_labels": torch.arange(9, 9 + LENGTH).masked_fill(torch.arange(LENGTH) >= LENGTH - 3, -100),
        }
        for i in range(4)
    ]
    module = Untouched(in_place=False)
    quiet_trainer(2, strategy={"ring_size": 2, "preflight": False}).fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    return module.losses
