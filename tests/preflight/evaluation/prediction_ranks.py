"""What each rank runs in test_predictions.py: a module that predicts in a way of choice; returns plain values."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.models import GPT, GPTConfig
from lightning_sp.reductions import last_token, sequence_mean
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, quiet_trainer


class Predicting(Plain):
    """Predicts as its kind says."""

    def __init__(self, kind: str) -> None:
        super().__init__(lambda: GPT(GPTConfig(vocab_size=VOCAB, dim=32, num_layers=1, num_heads=4, max_positions=64)))
        self.kind = kind

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        ids = batch["input_ids"]
        if self.kind == "positions of its own":
            return self.model(ids, torch.arange(ids.shape[1]).expand_as(ids))
        logits = self.logits(batch)
        return {
            "logits": lambda: {"logits": logits, "ids": logits.argmax(-1)},
            "pooled": lambda: (sequence_mean(logits), last_token(logits)),
            "drawn": lambda: torch.multinomial(logits.softmax(-1).flatten(0, 1), 1).view_as(ids),
            "text": lambda: [" ".join(map(str, row.tolist())) for row in logits.argmax(-1)],
            "number of tokens": lambda: {"n": logits.shape[1]},
            "number of tokens, later": lambda: {"ids": ids, **({"n": ids.shape[1]} if batch_idx else {})},
        }[self.kind]()


def predicted(kind: str, world: int, strategy: dict[str, Any]) -> dict[str, Any]:
    """Predict two batches; return what came back, or the refusal, and what was said."""
    torch.manual_seed(0)
    trainer = quiet_trainer(world, strategy=strategy)
    loader = DataLoader(TokenDataset(4, 31), batch_size=2 // strategy.get("data_parallel_size", 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outputs, error = trainer.predict(Predicting(kind), loader), ""
        except SequenceParallelError as refusal:
            outputs, error = [], str(refusal)
    said = [str(each.message) for each in caught if str(each.message).startswith("preflight:")]
    return {"outputs": outputs, "error": error, "said": said}
