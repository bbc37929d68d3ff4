"""Runs of users in which is noted what is replaced: modules that look at each moment of theirs."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from tests.trainer.replaced import found
from tests.trainer.tiny import HuggingFaceLlama, Plain, TokenDataset, quiet_trainer, tiny_gpt, tiny_llama


class Looking(Plain):
    """A user's module that notes what is replaced at each moment."""

    def configure_model(self) -> None:
        found.note("building")
        super().configure_model()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        found.note("a step")
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda _: found.note("a backward"))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        found.note("between steps")

    def on_train_epoch_end(self) -> None:
        found.note("between steps")

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        found.note("an evaluation")
        self.log("val_loss", self.logits(batch).square().mean())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        found.note("a checkpoint")

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        found.note("an evaluation")
        return self.logits(batch)


class ByHand(Looking):
    """The same by manual optimization."""

    def __init__(self, build: Any) -> None:
        super().__init__(build)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Failing(Looking):
    """Raises an error in its second step."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.raw_grads:
            raise ValueError("a step's own error")
        return super().training_step(batch, batch_idx)


def adapted() -> nn.Module:
    """Return transformers' Llama with peft's LoRA on it."""
    from peft import LoraConfig, get_peft_model

    whole = HuggingFaceLlama()
    whole.inner = get_peft_model(whole.inner, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return whole


def noted() -> nn.Module:
    """Return a Llama with a note of its user's on a weight."""
    model = tiny_llama()
    next(model.parameters())._no_weight_decay = True  # type: ignore[attr-defined]
    return model


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one's own model": (partial(Looking, tiny_llama), {}),
    "in the global view": (partial(Looking, partial(tiny_gpt, dropout=0.1)), {"strategy": {"global_view": True}}),
    "a model of Hugging Face": (partial(Looking, HuggingFaceLlama), {"strategy": {"global_view": "auto"}}),
    "with LoRA": (partial(Looking, adapted), {}),
    "by hand": (partial(ByHand, tiny_llama), {}),
    "every block recomputed, staged, in tiles": (
        partial(Looking, HuggingFaceLlama),
        {"strategy": {"activation_checkpointing": "full", "mlp_tile_tokens": "auto", "ulysses_stages": 2, "ulysses_size": 2,
                      "stage_inputs": "recomputed", "activation_offload": "disk", "offload_folder": "."}},
    ),
    "split layers": (partial(Looking, HuggingFaceLlama), {"strategy": {"tensor_parallel_size": 2}}),
    "averaged, with checkpoints": (partial(Looking, tiny_llama), {"callbacks": "averaged", "enable_checkpointing": True}),
    "one that fails in its second step": (partial(Failing, tiny_llama), {}),
    "accumulated, clipped": (partial(Looking, noted), {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}),
}  # fmt: skip


def looked_at(names: list[str], folder: str, most: int = 1000) -> found.Found:
    """Train, validate and predict in each run; return what is replaced, by the moments at which it is, and what stays, as "afterwards"."""
    _run(partial(Plain, tiny_llama), {}, folder)  # imports what is imported late
    found.begin(most)
    for name in names:
        _run(*RUNS[name], folder)
    found.note("afterwards")
    return found.end()


def _run(build: Any, options: dict[str, Any], folder: str) -> None:
    torch.manual_seed(0)
    options = dict(options)
    if options.get("callbacks") == "averaged":
        options["callbacks"] = [EMAWeightAveraging(decay=0.9), ModelCheckpoint(dirpath=folder, every_n_train_steps=2)]
    strategy = options.get("strategy", {})
    if strategy.get("offload_folder"):
        options["strategy"] = {**strategy, "offload_folder": folder}
    trainer: pl.Trainer = quiet_trainer(2, max_steps=2, limit_val_batches=1, **options)
    module, data = build(), DataLoader(TokenDataset(4), batch_size=1)
    with suppress(ValueError):
        trainer.fit(module, data, data if isinstance(module, Looking) else None)
    if isinstance(module, Looking) and not isinstance(module, Failing):
        trainer.predict(module, data)
