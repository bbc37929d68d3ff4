"""What runs in the ranks: steps that do something with tokens of which the first batches hold none, and later ones some."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_sp.errors import SequenceParallelError
from tests.trainer.tiny import VOCAB, Plain, _full, plain_trainer, quiet_trainer, tiny_llama

# The batch behind three steps is tried anew.
MARK, LENGTH, LATER = VOCAB - 1, 32, 8


class Rows(Dataset):
    """Rows without the mark and without neighbours that are alike, and later ones with both; sessions of which there is one at first."""

    def __len__(self) -> int:
        return LATER + 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(index)
        row = (torch.arange(LENGTH + 1) * 7 + torch.randint(0, MARK, (1,), generator=g)) % MARK
        sessions = torch.zeros(LENGTH, dtype=torch.int64)
        if index >= LATER:
            row[[5, 20]] = MARK
            row[[8, 9, 25]] = row[[7, 8, 24]]
            sessions[11:] = 1
        return {
            "input_ids": row[:-1],
            "shift_labels": row[1:],
            "position_ids": torch.arange(LENGTH),
            "session_ids": sessions,
        }


class Numbers(Rows):
    """Rows with gaps between tokens that are none at first, tokens of one kind, and padding that is none."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        kept = LENGTH - 7 - index if index >= LATER else LENGTH
        mask = (torch.arange(LENGTH) < kept).long()
        labels = row["shift_labels"].masked_fill(mask == 0, -100)
        gaps = torch.arange(LENGTH).double() % 5 * (index >= LATER) / 10
        kinds = (torch.arange(LENGTH) % 3 == 0).long() * (index >= LATER)
        return {**row, "shift_labels": labels, "attention_mask": mask, "gaps": gaps, "token_type_ids": kinds}


class Reads(Plain):
    """Does something with a token's neighbours, or with those before it, by a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__(tiny_llama)
        # As many marks as a row of later batches has, and not as many as a trial might show.
        self.kind, self.features = kind, nn.Embedding(3 if kind == "looked up" else LENGTH, VOCAB)
        self.register_buffer("marks", F.one_hot(torch.tensor(MARK), VOCAB))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids, labels, sessions = batch["input_ids"], batch["shift_labels"], batch["session_ids"]
        logits = self.logits(batch)
        if self.kind == "behind the mark":
            labels = labels.masked_fill((ids == MARK).cumsum(1) > 0, -100)
        features = {
            "segments": lambda: (ids == MARK).long().cumsum(1),
            "looked up": lambda: self.marks[ids].cumsum(1),
            "the one before": lambda: F.pad(ids, (1, 0))[:, :-1].eq(MARK).long(),
            "as the one before": lambda: F.pad(ids[:, 1:] == ids[:, :-1], (1, 0)).long(),
            "in the row": lambda: torch.isin(ids, torch.tensor([MARK])).long().amax(1, keepdim=True).expand_as(ids),
            "sessions": lambda: F.pad((sessions[:, 1:] != sessions[:, :-1]).long().cumsum(1), (1, 0)),
        }
        numbers = {
            "elapsed": lambda: batch["gaps"].cumsum(1),
            "kinds of tokens": lambda: batch["token_type_ids"].cumsum(1).double(),
            "share of tokens": lambda: batch["attention_mask"].double().mean(1, keepdim=True).expand_as(ids),
            "rare tokens": lambda: F.one_hot(ids, VOCAB).sum(1)[:, MARK:].double().expand_as(ids),
        }
        if self.kind in numbers:
            logits = logits + numbers[self.kind]()[..., None] * self.features.weight[0]
        if self.kind in features:
            logits = logits + self.features(features[self.kind]())
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.losses.append(float(loss.detach()))
        return loss


NUMBERS = ("elapsed", "kinds of tokens", "share of tokens", "rare tokens")
KINDS = (
    *NUMBERS,
    "behind the mark",
    "looked up",
    "segments",
    "the one before",
    "as the one before",
    "in the row",
    "sessions",
)


def fit(kind: str, world: int, strategy: dict[str, Any] | None) -> tuple[str, dict[str, Tensor]]:
    """Return what a fit is refused with, and its weights."""
    torch.manual_seed(2)
    module = Reads(kind)
    options: dict[str, Any] = {"max_epochs": 1}
    trainer = plain_trainer(**options) if strategy is None else quiet_trainer(world, strategy=strategy, **options)
    try:
        trainer.fit(module, DataLoader(Numbers() if kind in NUMBERS else Rows(), batch_size=2))
    except SequenceParallelError as error:
        return str(error), {}
    return "", {name: _full(each.detach()).clone() for name, each in module.named_parameters()}


class Evaluates(Reads):
    """Logs shares of tokens, keeps times that have passed, and predicts what stands behind the mark."""

    def __init__(self) -> None:
        super().__init__("none")
        self.elapsed: list[Tensor] = []

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.logits(batch)
        self.log("share", batch["attention_mask"].double().mean())

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.logits(batch)
        self.elapsed.append(batch["gaps"].cumsum(1))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.logits(batch)
        return (batch["input_ids"] == MARK).cumsum(1)


class Opens(Evaluates):
    """Counts what all tokens of first batches have alike: marks that are looked up, missing numbers, a gate that is shut."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.logits(batch)
        self.log("share", self.marks[batch["input_ids"]].cumsum(1).double().mean())

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.logits(batch)
        self.elapsed.append(batch["gaps"].isnan().cumsum(1))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.logits(batch)
        return (batch["input_ids"].double() / MARK > 0.99).cumsum(1)


class Missing(Numbers):
    """Rows of which later ones lack a number."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        gaps = torch.arange(LENGTH).double() % 5 / 10
        return {**row, "gaps": gaps.index_fill(0, torch.tensor(9), float("nan")) if index >= LATER else gaps}


def evaluate(world: int, strategy: dict[str, Any] | None, opens: bool = False) -> dict[str, Tensor]:
    """Return what a validation logs, a test keeps and a prediction gives."""
    torch.manual_seed(2)
    module = Opens() if opens else Evaluates()
    loader = DataLoader(Missing() if opens else Numbers(), batch_size=2)
    named = {"sequence_dims": {"session_ids": 1, "gaps": 1}}

    def trainer() -> Any:
        return plain_trainer() if strategy is None else quiet_trainer(world, strategy={**named, **strategy})

    [shown] = trainer().validate(module, loader, verbose=False)
    trainer().test(module, loader, verbose=False)
    predicted = trainer().predict(module, loader)
    return {
        "share": torch.tensor(shown["share"], dtype=torch.float64),
        "elapsed": torch.cat(module.elapsed),
        "predicted": torch.cat(predicted).double(),
    }
