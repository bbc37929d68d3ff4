"""Options, callbacks, plugins and hooks of Lightning: what each rank runs in test_options.py, under plain Lightning and under ours."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import AsyncCheckpointIO, FSDPPrecision, LayerSync, TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_sp import SequenceParallelError
from tests.trainer.lightning_ranks import User, trainer_of
from tests.trainer.tiny import VOCAB, TokenDataset, _full

Batch = dict[str, Tensor]


class Hooked(User):
    """Overrides hooks as users do, each named by what it overrides."""

    def __init__(self, hook: str = "", scheduler: str = "") -> None:
        super().__init__(scheduler)
        self.called: list[str] = []
        if hook:
            # On the instance, as Lightning looks hooks up; `is_overridden` asks the class for some.
            self.__class__ = type(f"Hooked_{hook}", (HOOKS[hook], Hooked), {})

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Leave out what `Plain` does here: some gradients are None."""

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.02)
        if not self.scheduler:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ClipsItself:
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.called.append("clip")
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class Backward:
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.called.append("backward")
        loss.backward()


class AfterBackward:
    def on_after_backward(self) -> None:
        self.called.append("after")
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5).clamp_(-0.01, 0.01)


class StepsItself:
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.called.append("step")
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (batch_idx + 1)
        optimizer.step(closure=optimizer_closure)


class ZeroesItself:
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.called.append("zero")
        optimizer.zero_grad(set_to_none=False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.called.append("before zero")


class Schedules:
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.called.append("schedule")
        scheduler.step()


class Transfers:
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.called.append("transfer")
        return {name: value.to(device) for name, value in batch.items()}


class BeforeTransfer:
    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        # The whole batch: what a position sees of the others must be the whole sequence's.
        return {**batch, "input_ids": batch["input_ids"].flip(1)}


class AfterTransfer:
    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return {**batch, "input_ids": (batch["input_ids"] + 1) % VOCAB}


class Skips:
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class ReturnsNone:
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class ModuleLoaders:
    def train_dataloader(self) -> DataLoader:
        return DataLoader(TokenDataset(10), batch_size=2)

    def configure_callbacks(self) -> list[Any]:
        return [callbacks.LambdaCallback(on_train_epoch_start=lambda *_: self.called.append("callback"))]


class Toggles:
    """Two optimizers that take turns, each with its own half of the parameters in the graph."""

    def on_fit_start(self) -> None:
        self.automatic_optimization = False

    def configure_optimizers(self) -> list[Any]:
        self.automatic_optimization = False
        named = list(self.named_parameters())
        halves = [p for n, p in named if ".layers.0." in n], [p for n, p in named if ".layers.0." not in n]
        return [torch.optim.AdamW(half, lr=0.02) for half in halves]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            with self.toggled_optimizer(optimizer):
                loss = torch.nn.functional.cross_entropy(
                    self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten()
                )
                self.manual_backward(loss)
                self.called.append(str(sum(p.grad is not None for p in self.parameters())))
                optimizer.step()
                optimizer.zero_grad()
            self.losses.append(float(loss.detach()))


class Replicated:
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model = nn.DataParallel(self.model)


HOOKS = {
    "replicated": Replicated,
    "clip": ClipsItself,
    "backward": Backward,
    "after_backward": AfterBackward,
    "step": StepsItself,
    "zero": ZeroesItself,
    "schedule": Schedules,
    "transfer": Transfers,
    "before_transfer": BeforeTransfer,
    "after_transfer": AfterTransfer,
    "skip": Skips,
    "none": ReturnsNone,
    "loaders": ModuleLoaders,
    "toggle": Toggles,
}


class Thaw(callbacks.BaseFinetuning):
    """Freezes the first layer before training, and thaws it in the second epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        pl_module.configure_model()
        self.freeze(pl_module.model.layers[0])

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.layers[0], optimizer, lr=0.01)


class Gradients(callbacks.Callback):
    """Looks at gradients right after the backward."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing is needed: that it is there is refused with accumulation."""


class Written(callbacks.BasePredictionWriter):
    """Collects what it is given to write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.indices: list[Any] = []
        self.predictions: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        self.indices.append(batch_indices)
        self.predictions.append(prediction)

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.indices.append(batch_indices)


CALLBACKS: dict[str, Any] = {
    "timer": lambda: callbacks.Timer(duration={"hours": 1}),
    "lambda": lambda: callbacks.LambdaCallback(on_train_batch_end=lambda *_: None),
    "finder": lambda: callbacks.LearningRateFinder(num_training_steps=15, early_stop_threshold=None),
    "thaw": Thaw,
    "summary": lambda: callbacks.ModelSummary(),
    "pruning": lambda: callbacks.ModelPruning("l1_unstructured", amount=0.5),
    "accumulation": lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
    "accumulation of one": lambda: callbacks.GradientAccumulationScheduler({0: 1}),
    "throughput": lambda: callbacks.ThroughputMonitor(batch_size_fn=len),
    "on exception": lambda: callbacks.OnExceptionCheckpoint(tempfile.mkdtemp()),
    "link": lambda: callbacks.ModelCheckpoint(tempfile.mkdtemp(), save_last="link"),
    "save on exception": lambda: callbacks.ModelCheckpoint(tempfile.mkdtemp(), save_on_exception=True),
    "gradients": Gradients,
    "spikes": lambda: callbacks.SpikeDetection() if hasattr(callbacks, "SpikeDetection") else callbacks.Callback(),
}


class Plugged(TorchCheckpointIO):
    """Counts what it writes and reads, and stores a word of its own."""

    def __init__(self) -> None:
        self.counts = {"saved": 0, "read": 0}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.counts["saved"] += 1
        super().save_checkpoint({**checkpoint, "word": storage_options}, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        self.counts["read"] += 1
        return super().load_checkpoint(path, map_location, weights_only)


class Failing(Plugged):
    """Cannot write."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        raise RuntimeError("the store is full")


class Layers(LayerSync):
    """A layer sync of a user's."""

    def apply(self, model: nn.Module) -> nn.Module:
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        return model


PLUGINS: dict[str, Any] = {
    "io": Plugged,
    "async": AsyncCheckpointIO,
    "layers": Layers,
    "fsdp precision": lambda: FSDPPrecision("bf16-mixed"),
}


def runs(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run several in one call."""
    return [run(**case) for case in cases]


def run(
    strategy: dict[str, Any] | None,
    world: int,
    hook: str = "",
    callback: str = "",
    plugin: str = "",
    scheduler: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Fit a user's module, and return what a user would look at, or how it ended."""
    torch.manual_seed(3)
    user = Hooked(hook, scheduler)
    user.lr = 0.02
    loader = None if hook == "loaders" else DataLoader(TokenDataset(10), batch_size=2)
    chosen = [CALLBACKS[name]() for name in callback.split(", ") if name]
    given = [PLUGINS[plugin]()] if plugin else []
    try:
        trainer = trainer_of(strategy, world, callbacks=chosen, plugins=given, **options)
        trainer.fit(user, loader)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "error": "",
        "losses": user.losses,
        "called": user.called,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "weights": {n: _full(p.detach()).clone() for n, p in user.named_parameters()},
    }


def checkpointed(kind: str, folder: str, world: int) -> dict[str, Any]:
    """Save and resume through a CheckpointIO plugin; return what it did and what is left."""
    torch.manual_seed(3)
    plugin = {"io": Plugged, "failing": Failing, "async": AsyncCheckpointIO}[kind]()
    strategy = dict(ring_size=2, save_distributed_checkpoint=False, preflight=False)
    path = str(Path(folder) / "user.ckpt")
    first, user = trainer_of(strategy, world, plugins=[plugin], max_epochs=1), Hooked()
    first.fit(user, DataLoader(TokenDataset(4), batch_size=2))
    try:
        first.save_checkpoint(path, storage_options="word" if kind == "io" else None)
    except SequenceParallelError as error:
        return {"error": str(error)}
    first.strategy.teardown()  # what the end of a fit does: an asynchronous plugin finishes here
    dist.barrier()
    stored = torch.load(path, weights_only=True)
    again, resumed = trainer_of(strategy, world, plugins=[plugin], max_epochs=2), Hooked()
    again.fit(resumed, DataLoader(TokenDataset(4), batch_size=2), ckpt_path=path)
    return {
        "error": "",
        "counts": getattr(plugin, "counts", {}),
        "word": stored.get("word"),
        "losses": user.losses + resumed.losses,
        "names": sorted(stored["state_dict"]),
    }


class Split(TokenDataset):
    """The samples of one part, as a user splits them by hand."""

    def __init__(self, part: int, parts: int) -> None:
        super().__init__(8)
        self.tokens = self.tokens[part::parts].contiguous()


def split_by_the_user(how: str, strategy: dict[str, Any], world: int, epochs: int = 2) -> dict[str, Any]:
    """Fit with use_distributed_sampler=False; return which samples were trained on in each epoch, on this rank."""
    torch.manual_seed(3)
    user = Hooked()
    trainer = trainer_of(strategy, world, use_distributed_sampler=False, max_epochs=epochs)
    seen: list[list[int]] = [[] for _ in range(epochs)]
    rows = TokenDataset(8).tokens[:, :-1].tolist()

    def look(batch: Batch, dataloader_idx: int = 0) -> Batch:
        if trainer.training:
            seen[trainer.current_epoch] += [rows.index(row.tolist()) for row in batch["input_ids"]]
        return batch

    user.on_before_batch_transfer = look  # type: ignore[method-assign]
    sp = strategy.get("ring_size", 1) * strategy.get("ulysses_size", 1)
    dp, rank = world // sp, dist.get_rank()
    data: Any = TokenDataset(8)
    sampler: Any = None
    if how == "dataset":
        data = Split(rank // sp, dp)
    if how == "dataset by rank":
        data = Split(rank, world)
    if how == "sampler":
        sampler = DistributedSampler(data, num_replicas=dp, rank=rank // sp, shuffle=True, seed=5)
    if how == "sampler by rank":
        sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=5)
    try:
        trainer.fit(user, DataLoader(data, batch_size=1, sampler=sampler))
        # The flag is the user's in a second run too.
        trainer.validate(user, DataLoader(data, batch_size=1, sampler=sampler), verbose=False)
    except SequenceParallelError as error:
        return {"error": str(error)}
    return {"error": "", "seen": seen}


def written(strategy: dict[str, Any] | None, world: int) -> dict[str, Any]:
    """Predict with a writer of predictions."""
    torch.manual_seed(3)
    writer = Written()
    module = Hooked()
    module.predict_step = lambda batch: module.logits(batch).argmax(-1)  # type: ignore[method-assign]
    try:
        trainer_of(strategy, world, callbacks=[writer]).predict(module, DataLoader(TokenDataset(5), batch_size=2))
    except SequenceParallelError as error:
        return {"error": str(error)}
    return {"error": "", "indices": writer.indices, "predictions": writer.predictions}


class Streamed(IterableDataset):
    """The samples of a map-style dataset as a stream."""

    def __iter__(self) -> Any:
        data = TokenDataset(6)
        return (data[i] for i in range(len(data)))


def resumed_stream(folder: str, world: int) -> dict[str, list[float]]:
    """Fit two epochs of a stream whose loader is made anew in each, at once and with a resume within the first."""
    path, losses = str(Path(folder) / "three"), {}
    runs = dict(at_once=dict(max_epochs=2), begun=dict(max_steps=3), resumed=dict(max_epochs=2))
    for name, options in runs.items():
        torch.manual_seed(3)
        user = Hooked()
        trainer = trainer_of(dict(ring_size=2, preflight=False), world, reload_dataloaders_every_n_epochs=1, **options)
        resume = dict(ckpt_path=path, weights_only=True) if name == "resumed" else {}
        trainer.fit(user, DataLoader(Streamed(), batch_size=1), **resume)
        if name == "begun":
            trainer.save_checkpoint(path)
        losses[name] = user.losses
    return losses
