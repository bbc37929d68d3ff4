"""What the ranks of test_memory_options run."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize import shard_model
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups
from lightning_sp.parallelize.fsdp.unused_parameters import _gradient
from tests.parallelize.fsdp.gather_dtypes_ranks import rounded as rounded_gathers
from tests.trainer.tiny import HuggingFaceLlama, Plain, TokenDataset, _full, quiet_trainer, tiny_gpt


def run(module: Plain, strategy: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """Train for two steps of two micro-batches and return the weights."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = quiet_trainer(world, strategy=strategy, accumulate_grad_batches=2, **options)
    trainer.fit(module, DataLoader(TokenDataset(8, 32), batch_size=2))
    return {name: _full(each.detach()).clone() for name, each in module.named_parameters()}


def build(lr: float = 0.01, tied: bool = False) -> Plain:
    torch.manual_seed(3)
    return Plain(TiedLlama if tied else HuggingFaceLlama, lr)


class TiedLlama(HuggingFaceLlama):
    """Whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.lm_head.weight = self.inner.model.embed_tokens.weight


def fits(cases: list[dict[str, Any]], folder: str, tied: bool = False) -> dict[str, Any]:
    """Run several fits; return their weights, and what is left in the folder of activations."""
    runs = []
    for strategy in cases:
        chosen = dict(strategy, offload_folder=folder) if strategy.get("activation_offload") == "disk" else strategy
        runs.append(run(build(tied=tied), chosen))
    return {"runs": runs, "left": os.listdir(folder)}


class Between(Plain):
    """Notes what a rank holds of gradients behind each micro-batch, in numbers: of whole weights, and of shards."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(HuggingFaceLlama)
        self.held: list[tuple[int, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        groups = parameter_groups(fsdp_modules(self))
        whole = [_gradient(each) for group in groups for each in group.fsdp_params]
        shards = [each.grad.to_local() for each in self.parameters() if each.grad is not None]
        self.held.append(
            (sum(each.numel() for each in whole if each is not None), sum(each.numel() for each in shards))
        )


def accumulated(strategy: dict[str, Any]) -> tuple[dict[str, Tensor], list[tuple[int, int]], int]:
    """Return the weights of a run, what it held behind each micro-batch, and how many numbers its weights have."""
    module = Between()
    weights = run(module, strategy)
    return weights, module.held, sum(each.numel() for each in weights.values())


def resumed(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of a run, and of one that goes on from a checkpoint in which embedding and head were of the model's unit."""
    strategy, data = dict(ulysses_size=2, preflight=False), DataLoader(TokenDataset(8, 32), batch_size=2)
    weights = []
    for as_one in (False, True):
        module = build()
        if as_one:
            with mock.patch.object(sys.modules[shard_model.__module__], "vocabulary_layers", return_value=[]):
                trainer = quiet_trainer(2, strategy=strategy, max_steps=2)
                trainer.fit(module, data)
                trainer.save_checkpoint(f"{folder}/older")
            module = build()
        path = f"{folder}/older" if as_one else None
        quiet_trainer(2, strategy=strategy, max_steps=4).fit(module, data, ckpt_path=path)
        weights.append({name: _full(each.detach()).clone() for name, each in module.named_parameters()})
    return weights[0], weights[1]


class Manual(Plain):
    """Runs a forward between a backward and its update, and one after it: a head that is whole then has the weights from before."""

    def __init__(self) -> None:
        super().__init__(HuggingFaceLlama)
        self.automatic_optimization = False

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.loss(batch)
        optimizer.step()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


def by_hand(strategies: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Return the weights of runs of two steps by hand."""
    found = []
    for strategy in strategies:
        torch.manual_seed(3)
        module = Manual()
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        quiet_trainer(world, strategy=dict(strategy, preflight=False), max_steps=4).fit(
            module, DataLoader(TokenDataset(8, 32), batch_size=2)
        )
        found.append({name: _full(each.detach()).clone() for name, each in module.named_parameters()})
    return found


class Thawed(Plain):
    """A block is frozen when it is built, and in the first epoch."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model.layers[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.model.layers[0].requires_grad_(self.current_epoch > 0)


def thawed(gradient_dtype: str) -> dict[str, Tensor]:
    """Return the weights after an epoch with a frozen block and one with all, of gradients that are summed over two micro-batches."""
    torch.manual_seed(3)
    module = Thawed(partial(tiny_gpt, num_layers=2))
    options: dict[str, Any] = dict(max_epochs=2, accumulate_grad_batches=2)
    quiet_trainer(2, strategy=dict(gradient_dtype=gradient_dtype), **options).fit(
        module, DataLoader(TokenDataset(), batch_size=2)
    )
    return {name: _full(each.detach()).clone() for name, each in module.named_parameters()}


def rounded(folder: str) -> dict[str, float]:
    """Return how far gradients summed in bfloat16 are from those of the same run in their own dtype, relative to their norm."""
    found = []
    for gradient_dtype in ("auto", "bfloat16"):
        module = build(lr=0.0)
        run(module, dict(ulysses_size=2, gradient_dtype=gradient_dtype), precision="32-true")
        found.append(module.raw_grads[0])
    own, other = found
    total = sum(float(each.pow(2).sum()) for each in own.values()) ** 0.5
    return {"bfloat16": sum(float((own[n] - other[n]).pow(2).sum()) for n in own) ** 0.5 / total}


def autocast(cases: list[dict[str, Any]]) -> list[tuple[list[float], list[dict[str, Tensor]], set[str]]]:
    """Return losses and gradients of fits under autocast with gathers in float32 and as by default, and what travelled in bfloat16."""
    found = []
    for strategy in cases:
        module = build()
        module.configure_model()
        for each in module.parameters():
            each._no_weight_decay = True  # type: ignore[attr-defined]  # a user's note
        options = dict(precision="bf16-mixed", accumulate_grad_batches=2, max_steps=4, max_epochs=2)
        quiet_trainer(2, strategy=strategy, **options).fit(module, DataLoader(TokenDataset(8, 32), batch_size=2))
        found.append((module.losses, module.raw_grads, rounded_gathers(module)))
    return found


def refusal(options: dict[str, Any]) -> str:
    """Return why a fit is refused."""
    try:
        run(build(), dict(ulysses_size=2, **options))
    except SequenceParallelError as error:
        return str(error)
    return "NOT REFUSED"


def again(folder: str) -> str:
    """Train a module a second time by other options."""
    module = build()
    run(module, dict(ulysses_size=2))
    try:
        run(module, dict(
            ulysses_size=2, reshard_after_forward=False, activation_checkpointing=True, activation_offload="disk", offload_folder=folder,
        ))  # fmt: skip
    except SequenceParallelError as error:
        return str(error)
    return "NOT REFUSED"
