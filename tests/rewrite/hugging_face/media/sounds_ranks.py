"""What each rank runs in test_expansion.py and test_own_shift.py, and the same on one process in plain torch; returns plain values."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lightning_sp import SequenceParallelError
from tests.flows.models.sounds.qwen_audio import SOUND, model, samples_of
from tests.trainer.tiny import Plain, quiet_trainer

ROWS = 4


class Model(Plain):
    def __init__(self) -> None:
        super().__init__(None)
        self.model = model()
        self.model.config.ignore_index = -100  # read by the older way, of one placeholder for a sound, and absent

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        used = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
        self.raw_grads.append({n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in used.items()})


def rows_of(kind: str) -> list[dict[str, Tensor]]:
    """Return rows of text alone, or each with a sound: a placeholder for each of its tokens, or one for all."""
    rows = samples_of()[:ROWS]
    for row in rows:
        if kind == "text":
            row["input_ids"] = row["input_ids"].masked_fill(row["input_ids"] == SOUND, 7)
            row.pop("input_features")
            row.pop("feature_attention_mask")
        elif kind == "one for all":
            first = int((row["input_ids"] == SOUND).long().argmax())
            row["input_ids"] = row["input_ids"].masked_fill(row["input_ids"] == SOUND, 7)
            row["input_ids"][first] = SOUND
        else:
            row["input_features"] = row["input_features"].double()
    return rows


def one_process(kind: str, **_: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    module = Model().double()
    loss = module.training_step(default_collate(rows_of(kind)), 0)
    loss.backward()
    return {
        "loss": float(loss.detach()),
        "grads": {n: p.grad for n, p in module.named_parameters() if p.grad is not None},
    }


def sharded(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_sharded(**case) for case in cases]


def _sharded(kind: str, strategy: dict[str, Any]) -> dict[str, Any]:
    module = Model()
    try:
        trainer = quiet_trainer(2, strategy=strategy, max_steps=1)
        trainer.fit(module, DataLoader(rows_of(kind), batch_size=ROWS))  # type: ignore[arg-type]
        error = ""
    except SequenceParallelError as refusal:
        error = str(refusal)
    except Exception as other:
        error = f"NOT BY NAME {other!r}: {traceback.format_exc()}"
    return {"error": error, "losses": module.losses, "grads": module.raw_grads[-1] if module.raw_grads else {}}
