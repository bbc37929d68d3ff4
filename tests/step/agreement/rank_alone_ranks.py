"""Runs in ranks: fits in which rank 1 writes a buffer, registers a hook or replaces a `forward` for itself."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader

from lightning_sp.step.agreement import rank_alone
from tests.trainer.tiny import Plain, TokenDataset, quiet_trainer, steps_of, tiny_llama


class Alone(Plain):
    def __init__(self, what: str | None) -> None:
        super().__init__(tiny_llama)
        self.what = what

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model.register_buffer("load", torch.ones(3))
            self.model.register_buffer("cache", torch.ones(3), persistent=False)

    def on_train_batch_end(self, *_: Any) -> None:
        if steps_of(self.trainer) != 1:
            return
        model, rank = self.model, self.global_rank
        if self.what == "writes on all":
            model.load.fill_(5.0)
            model.head.register_forward_hook(lambda *_: None)
        if self.what == "an average of its own":
            model.load.fill_(float(rank))
        if rank != 1:
            return
        if self.what == "a cache of another length":
            model.cache = torch.ones(4)
        if self.what == ".data":
            model.load.data[1] = 2.0
        if self.what == "a hook of a weight":
            model.head.weight.register_hook(lambda gradient: gradient * 2)
        if self.what == "a hook of a module":
            model.layers[0].register_forward_hook(lambda module, given, output: output * 2)
        if self.what == "a forward":
            own = model.layers[0].forward
            model.layers[0].forward = lambda *given, **named: own(*given, **named) * 2


def fit_alone(what: str | None, strategy: dict[str, Any], *, when: str) -> list[str]:
    """Fit, comparing each second step, before a checkpoint or at the end alone; return what was warned of."""
    trainer = quiet_trainer(
        int(os.environ["WORLD_SIZE"]), strategy=dict(preflight=False, **strategy), max_steps=4 if when == "steps" else 2
    )
    every = mock.patch.object(rank_alone, "EVERY_STEPS", 2 if when == "steps" else 1000)
    with every, warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        if when == "checkpoint":
            with mock.patch.object(type(trainer.strategy._run), "end_fit"):  # type: ignore[attr-defined]
                trainer.fit(Alone(what), DataLoader(TokenDataset(size=16), batch_size=1))
            trainer.save_checkpoint(Path(trainer.strategy.broadcast(folder)) / "last.ckpt")
        else:
            trainer.fit(Alone(what), DataLoader(TokenDataset(size=16), batch_size=1))
    return [str(each.message) for each in caught if "other things in the model" in str(each.message)]
