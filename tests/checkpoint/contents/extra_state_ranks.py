"""A module with a state that is no tensor, and what its hooks add to a checkpoint: what each rank runs in test_extra_state.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, tiny_llama


class Counter(nn.Module):
    """Counts, and says so in `get_extra_state`."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Any = {"steps": 0, "names": ("a", "b")}

    def get_extra_state(self) -> Any:
        return self.counted

    def set_extra_state(self, state: Any) -> None:
        self.counted = state


class Counting(Plain):
    """Built at once, for `load_from_checkpoint`; keeps halves of its weights in its checkpoints."""

    def __init__(self) -> None:
        super().__init__(partial(tiny_llama))
        self.counter, self.halves = Counter(), {}
        self.configure_model()

    def on_train_batch_end(self, *_: Any) -> None:
        self.counter.counted = {**self.counter.counted, "steps": self.counter.counted["steps"] + 1}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["halves"] = {name: each.detach() * 0.5 for name, each in self.named_parameters()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.halves = checkpoint["halves"]


def fit_and_save(path: str) -> dict[str, Any]:
    """Train a step, and save: then with a state that would not load again."""
    torch.manual_seed(0)
    module = Counting()
    trainer = quiet_trainer(2, strategy={"preflight": False}, max_steps=1)
    trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    trainer.save_checkpoint(path)
    module.counter.counted["device"] = object()
    said = ""
    try:
        trainer.save_checkpoint(f"{path}.refused")
    except SequenceParallelError as error:
        said = str(error)
    return {"weights": {name: each.detach().full_tensor() for name, each in module.named_parameters()}, "said": said}
