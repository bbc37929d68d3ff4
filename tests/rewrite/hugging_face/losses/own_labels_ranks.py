"""What each rank runs in test_own_labels.py: steps that hand a model's loss labels of their own, another kind in each step."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

from lightning_sp.reductions import shift
from tests.flows.models.sounds.qwen_audio import model as audio_model
from tests.trainer.tiny import HuggingFaceLlama, Plain, _full, plain_trainer, quiet_trainer

LENGTH = 23  # the degrees do not divide it


def _masked(ids: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
    return {"labels": batch["labels"].masked_fill(ids % 3 == 0, -100)}


def _in_place(ids: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
    batch["labels"][ids % 3 == 0] = -100
    return {"labels": batch["labels"]}


def _in_the_batch(ids: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
    batch["labels"] = batch["labels"].masked_fill(ids % 5 == 0, -100)
    return batch


def _of_ids(ids: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
    return {"labels": ids.clone()}


def _on_some_ranks(ids: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
    drop = ids == batch["rare"][0]
    return {"labels": batch["labels"].masked_fill(drop, -100) if bool(drop.any()) else batch["labels"]}


def _shifted(ids: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
    targets = shift(batch["labels"], 1, -100)
    return {"labels": batch["labels"], "shift_labels": targets.masked_fill(targets % 2 == 0, -100)}


def _as_given(ids: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
    return batch


def _beside_inputs(ids: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
    return {**batch, "labels": batch["labels"].masked_fill(batch["labels"] % 3 == 0, -100)}


def _in_place_beside_inputs(ids: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
    batch["labels"][batch["labels"] % 3 == 0] = -100
    return batch


# Of a model whose decoder reads the labels, for which a sharded batch has the inputs that it would make of them.
OF_DECODER = (_beside_inputs, _in_place_beside_inputs, _as_given)
KINDS = (_masked, _in_place, _in_the_batch, _of_ids, _on_some_ranks, _shifted, _as_given)


class OwnLabels(Plain):
    """Another kind of labels in each micro-batch, or the first kind from step 5 on."""

    def __init__(self, case: str) -> None:
        super().__init__({"audio": audio_model, "decoder": tiny_t5}.get(case, HuggingFaceLlama))
        self.kinds = OF_DECODER if case == "decoder" else KINDS
        self.late, self.valid = case == "late", []

    def loss(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        kind = (_masked if batch_idx >= 5 else _as_given) if self.late else self.kinds[batch_idx % len(self.kinds)]
        batch = {**batch}
        ids, rare = batch["input_ids"], batch.pop("rare")
        given = kind(ids, {**batch, "rare": rare})
        given.pop("rare", None)
        model = getattr(self.model, "inner", self.model)
        found: Tensor = model(**{"input_ids": ids, **given}).loss
        return found

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.loss(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.valid.append(float(self.loss(batch, batch_idx)))


def tiny_t5() -> Any:
    sizes = dict(vocab_size=32, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, dropout_rate=0.0)
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))


def rows(number: int, shifted: bool) -> list[dict[str, Tensor]]:
    """Return rows of text with their labels; with `shifted` with targets of the loader's own too, which are others."""
    ids = torch.randint(0, 30, (number, LENGTH), generator=torch.Generator().manual_seed(8))
    found = [{"input_ids": row, "labels": row.masked_fill(row % 7 == 0, -100), "rare": ids[0, 3]} for row in ids]
    if shifted:
        for row in found:
            row["shift_labels"] = row["labels"].roll(-1).masked_fill(row["input_ids"] % 2 == 0, -100)
    return found


def fit(world: int, options: dict[str, Any] | None, case: str, groups: int) -> dict[str, Any]:
    """Train, and validate behind it; return losses and weights. Without options plain Lightning on one device.

    Args:
        world: ranks.
        options: of the strategy.
        case: "late" begins with the batch's own labels, "shifted" has targets of the loader's own, "audio" a model that shifts by its mask,
            "decoder" one whose decoder reads the labels.
        groups: of data parallelism that the same rows are for: one device has them all.
    """
    torch.manual_seed(3)
    module = OwnLabels(case)
    steps: dict[str, Any] = dict(max_epochs=1, num_sanity_val_steps=0, limit_val_batches=3)
    data, batch_size = rows(2 * groups * len(KINDS), case == "shifted"), 2 * groups if options is None else 2
    loaders = [DataLoader(data, batch_size=batch_size) for _ in range(2)]  # type: ignore[arg-type]
    # A model's loss is in float32 on every number of ranks: added up in another order its last digits are others.
    with patch.object(torch.Tensor, "float", lambda self: self if self.is_floating_point() else self.double()):
        trainer = plain_trainer(**steps) if options is None else quiet_trainer(world, strategy=options, **steps)
        trainer.fit(module, *loaders)
    weights = {name: _full(each.detach()).clone() for name, each in module.named_parameters()}
    return {"losses": module.losses, "valid": module.valid, "weights": weights}
