"""Runs in ranks: a frozen body and a trained adapter, whose checkpoints leave the body out where nothing of it can be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.checkpoint import EXCLUDED, read_checkpoint_folder, sharded_like
from tests.trainer.lightning_ranks import trainer_of
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, _full, tiny_llama

LEAVES_OUT = {"exclude_frozen_parameters": True, "preflight": False}


class Adapted(nn.Module):
    """A body that is built alike in each run, as one that is read from a pretrained model is, and an adapter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = tiny_llama(2)
        self.adapter = nn.Sequential(nn.Linear(VOCAB, 2, bias=False), nn.Linear(2, VOCAB, bias=False))
        self.body.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        for each in self.body.parameters():  # in float32, as files have them, whatever the precision is
            each.copy_(0.2 * torch.randn(each.shape, generator=generator, device="cpu", dtype=torch.float32))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits = self.body(input_ids, position_ids)
        return logits + self.adapter(logits)


class Module(Plain):
    """What happens to it at a step, or when it is saved, is an attack on what its checkpoint leaves out."""

    def __init__(self, seed: int = 1, optimizer: str = "AdamW", happens: str = "") -> None:
        super().__init__(None)
        self.save_hyperparameters()
        self.seed, self.optimizer, self.happens = seed, optimizer, happens

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Adapted(self.seed)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step
        if self.happens == "trained for a step" and step in (1, 2):
            self.model.body.requires_grad_(step == 1)

    def on_train_batch_end(self, *_: Any) -> None:
        body = self.model.body
        if self.happens == "rows exchanged" and self.trainer.global_step == 2:
            weight = body.embedding.weight.detach()
            weight.copy_(sharded_like(weight.full_tensor().flip(0), weight))
        if self.happens == "signs changed" and self.trainer.global_step == 2:
            body.embedding.weight.data.neg_()

    def on_train_end(self) -> None:
        if self.happens == "frozen at the end":
            self.model.body.requires_grad_(False)

    def on_fit_start(self) -> None:
        if self.happens == "frozen at the end":
            self.model.body.requires_grad_(True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.happens == "merged at the save":
            name = next(each for each in checkpoint["state_dict"] if "body" in each)
            checkpoint["state_dict"][name] = checkpoint["state_dict"][name] * 2

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.logits(batch).double().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        # Frozen ones too: an optimizer skips what has no gradient.
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.05)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: _full(each.detach()).clone() for name, each in module.named_parameters()}


def run(
    strategy: dict[str, Any],
    *,
    module: dict[str, Any] | None = None,
    save: str = "",
    resume: str = "",
    before: dict[str, Any] | None = None,
    average: bool = False,
    steps: int = 4,
    micro: int = 1,
) -> dict[str, Any]:
    """Fit, and save or resume.

    Args:
        strategy: its options.
        module: of `Module`.
        save: where to.
        resume: from where.
        before: of the strategy of a Trainer that fits the same module first, its body trained.
        average: with an average of the weights, which takes their places when the fit ends; so it saves after two steps, as `step=2.ckpt`.
        steps: of the fit.
        micro: rows of a micro-batch.
    """
    world, fitted = torch.distributed.get_world_size(), Module(**(module or {}))
    try:
        if before is not None:
            fitted.happens = "frozen at the end"
            trainer_of(before, world, max_steps=2).fit(fitted, DataLoader(TokenDataset(8), batch_size=micro))
            fitted.happens = ""
        called = [callbacks.EMAWeightAveraging(decay=0.6)] if average else []
        if average and save:
            called.append(callbacks.ModelCheckpoint(save, "{step}", every_n_train_steps=2, save_top_k=-1))
        trainer = trainer_of(strategy, world, max_steps=steps, callbacks=called, enable_checkpointing=average)
        trainer.fit(fitted, DataLoader(TokenDataset(8), batch_size=micro), ckpt_path=resume or None)
        if save and not average:
            trainer.save_checkpoint(save)
    except SequenceParallelError as error:
        return {"error": str(error)}
    return {
        "error": "",
        "weights": weights(fitted),
        "optimized": sorted(trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]),
    }


def restored(strategy: dict[str, Any], path: str, seed: int = 1, strict: bool = True) -> dict[str, Any]:
    """Validate a new module with a checkpoint; return its weights."""
    module = Module(seed)
    module.strict_loading = strict
    trainer = trainer_of({"preflight": False, **strategy}, torch.distributed.get_world_size())
    try:
        trainer.validate(module, DataLoader(TokenDataset(4), batch_size=1), ckpt_path=path, verbose=False)
    except SequenceParallelError as error:
        return {"error": str(error)}
    return {"error": "", "weights": weights(module)}


def several(calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    """Make several calls in one: names of functions here, and what they are given."""
    return [globals()[name](*args, **options) for name, args, options in calls]


def stored(path: str | Path) -> tuple[set[str], set[str]]:
    """Return the names of a checkpoint's weights, and of what was left out of them."""
    path = Path(path)
    checkpoint = torch.load(path, weights_only=True) if path.is_file() else read_checkpoint_folder(path)
    return set(checkpoint["state_dict"]), set(checkpoint.get(EXCLUDED, {}).get("state_dict", {}))


def size_bytes(path: str | Path) -> int:
    path = Path(path)
    return path.stat().st_size if path.is_file() else sum(each.stat().st_size for each in path.iterdir())
