"""What each rank runs in test_alike_outputs.py: values that all ranks of a sequence have alike, of tokens and of none."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import VOCAB, Plain, plain_trainer, quiet_trainer, tiny_llama

# Of 64 tokens each of two ranks has 32, in pieces of 16.
LENGTH, PART, PIECE = 64, 32, 16


class Hours(Dataset):
    """Rows of tokens, each with an hour that repeats with a piece's length. The first of the second piece is as the one before."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place = torch.arange(LENGTH)
        ids = (place * 7 + index * 3) % VOCAB
        ids[PIECE] = ids[PIECE - 1 + index % 2]  # in every second row
        return {"input_ids": ids, "shift_labels": ids.roll(-1), "position_ids": place, "hour_ids": place % PIECE}


class Found:
    """An object of the user's own."""

    def __init__(self, hours: Tensor, flags: Tensor) -> None:
        self.hours, self.flags, self.name = hours, flags, "of a row"


class Alike(Plain):
    """Returns and keeps hours of each token, flags that are 0 of as many features as a rank has tokens, and of tokens."""

    def __init__(self) -> None:
        super().__init__(tiny_llama)
        self.kept: list[Any] = []
        self.by_name: dict[str, list[Tensor]] = {"hours": [], "flags": []}
        self.last: Any = None

    def found(self, batch: dict[str, Tensor]) -> Found:
        rows = len(self.logits(batch))
        return Found(batch["hour_ids"] * 2, torch.zeros(rows, PART, dtype=torch.int64))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        found = self.found(batch)
        self.kept.append((found.hours, found.flags))
        self.by_name["hours"].append(found.hours)
        self.by_name["flags"].append(found.flags)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        found = self.found(batch)
        late = (batch["input_ids"] < 0).long()  # no row has one
        return {"hours": found.hours, "flags": found.flags, "late": late, "objects": [found]}


class Neighbours(Alike):
    """Predicts whether a token is as the one before: of a part in all but one of a hundred places as of the whole."""

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        ids = batch["input_ids"]
        self.logits(batch)
        return F.pad(ids[:, 1:] == ids[:, :-1], (1, 0))


def neighbours(world: int, strategy: dict[str, Any] | None) -> tuple[str, list[Tensor]]:
    """Return what is refused, and predictions."""
    torch.manual_seed(0)
    trainer = plain_trainer() if strategy is None else quiet_trainer(world, strategy=strategy)
    loader = DataLoader(Hours(), batch_size=2, collate_fn=_without_hours)
    try:
        return "", trainer.predict(Neighbours(), loader)
    except SequenceParallelError as error:
        return str(error), []


def _without_hours(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in samples]) for name in samples[0] if name != "hour_ids"}


def shown(world: int, strategy: dict[str, Any] | None) -> tuple[str, list[Any]]:
    """Return what is refused, and what a validation keeps and a prediction returns, tensor by tensor."""
    torch.manual_seed(0)
    module, found = Alike(), list[Any]()
    loader = DataLoader(Hours(), batch_size=2)
    for run in ("validate", "predict"):
        trainer = (
            plain_trainer()
            if strategy is None
            else quiet_trainer(world, strategy={"sequence_dims": {"hour_ids": 1}, **strategy})
        )
        try:
            returned = getattr(trainer, run)(module, loader, **({"verbose": False} if run == "validate" else {}))
        except SequenceParallelError as error:
            return str(error), found
        if run == "predict":
            for each in returned:
                (of_object,) = each.pop("objects")
                found += [*each.values(), of_object.hours, of_object.flags, of_object.name]
    found += [each for pair in module.kept for each in pair] + [*module.by_name["hours"], *module.by_name["flags"]]
    return "", found
