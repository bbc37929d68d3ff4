"""What each rank runs in test_checkpoint.py: importable by name in the spawned ranks; returns plain values."""

from __future__ import annotations

import json
import logging
from enum import Enum
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_sp import SequenceParallelError
from lightning_sp.checkpoint.folders import folder
from lightning_sp.data import SequenceShardingDataModule
from lightning_sp.models import GPT, GPTConfig
from tests.trainer.tiny import VOCAB, TokenDataset, _full, quiet_trainer

ULYSSES_4 = {"ulysses_size": 4}
DP_RING = {"data_parallel_size": 2, "ring_size": 2}
RING_ULYSSES = {"ring_size": 2, "ulysses_size": 2}


def tied_gpt(width: int = 32, layers: int = 2) -> nn.Module:
    model = GPT(GPTConfig(vocab_size=VOCAB, dim=width, num_layers=layers, num_heads=4, max_positions=64))
    model.head.weight = model.embedding.weight
    return model


class Numbered(TokenDataset):
    """Samples that carry their number."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "number": torch.tensor(index)}


class Stream(IterableDataset):
    """The same samples in order, of this data-parallel group: an order that nobody can replace."""

    def __init__(self, module: pl.LightningModule, size: int) -> None:
        self.module, self.data = module, Numbered(size)

    def __iter__(self) -> Any:
        strategy = self.module.trainer.strategy
        for index in range(strategy.data_parallel_rank, len(self.data), strategy.data_parallel_size):
            yield self.data[index]


class Heard(logging.Handler):
    """Collects what rank 0 says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(self)
        self.logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def stop(self) -> str:
        self.logger.removeHandler(self)
        self.logger.setLevel(logging.ERROR)
        self.logger.propagate = True
        return "\n".join(self.lines)


class Colour(Enum):
    RED = 1


class Trained(pl.LightningModule):
    """A tied GPT, its losses, and the numbers of the samples that it saw."""

    def __init__(self, optimizer: str = "adamw", dropout: float = 0.0, build: Any = None, **sizes: int) -> None:
        super().__init__()
        self.optimizer, self.build, self.sizes = optimizer, build, sizes
        self.automatic_optimization = optimizer != "two"
        self.drop = nn.Dropout(dropout)
        self.model: Any = None
        self.losses: list[float] = []
        self.numbers: list[int] = []
        self.latest: tuple[float, list[int]] = (0.0, [])
        self.save_after: tuple[int, str] | None = None
        self.saved: dict[str, Any] = {}

    def save(self, path: str, *, weights_only: bool = False) -> None:
        """Save, and keep what the steps before it have seen."""
        self.saved = {"losses": self.losses[:], "numbers": self.numbers[:]}
        self.trainer.save_checkpoint(path, weights_only=weights_only)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build() if self.build else tied_gpt(**self.sizes)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.drop(self.model(batch["input_ids"], batch["position_ids"]))
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        numbers = batch["number"] if "number" in batch else batch["input_ids"][:, 0]
        self.latest = float(loss.detach()), numbers.tolist()
        self.log("train_loss", loss)
        if not self.automatic_optimization:
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(self.latest[0])
        self.numbers += self.latest[1]
        if self.save_after and not self.saved and self.trainer.global_step == self.save_after[0]:
            self.save(self.save_after[1])

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), on_epoch=True, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(batch["input_ids"], batch["position_ids"]).argmax(-1)

    def configure_optimizers(self) -> Any:
        kinds = {
            "adamw": lambda p: torch.optim.AdamW(p, 0.01),
            "sgd": lambda p: torch.optim.SGD(p, 0.1),
            "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        }
        if self.optimizer == "momentum":
            # Makes Lightning build the loader before it restores the checkpoint, where the number of epochs is given.
            assert self.trainer.estimated_stepping_batches > 0
            assert self.trainer.train_dataloader is not None
        if self.optimizer == "none":
            return None
        matrices = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim < 2]
        if self.optimizer == "two":
            return torch.optim.AdamW(matrices, 0.01), torch.optim.SGD(rest, 0.1)
        if self.optimizer == "groups":
            return torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], 0.01)
        optimizer = kinds[self.optimizer](self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Counting(Callback):
    """A callback with a state of its own, tensors included."""

    def __init__(self, value: Any = 0) -> None:
        self.value, self.batches = value, 0
        self.loaded: dict[str, Any] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "path": Path("a/b"), "tensor": torch.arange(3), "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches, self.loaded = state["batches"], dict(state)


def train(
    world: int,
    strategy: dict[str, Any],
    *,
    micro: int = 1,
    save: str | None = None,
    save_after: int | None = None,
    resume: str | None = None,
    module: dict[str, Any] | None = None,
    data: str = "shuffled",
    size: int = 8,
    callback: Any = None,
    plain: bool = False,
    weights_only: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Fit, save and resume; return losses, samples seen, final weights, and what was said."""
    pl.seed_everything(5, verbose=False)
    model = Trained(**(module or {}))
    heard = Heard()
    # The preflight has tests of its own, and is most of the time of a run this short.
    strategy = {"preflight": False, **strategy}
    defaults = {"max_steps": 3, "max_epochs": -1, "accumulate_grad_batches": 2}
    callbacks = [Counting(callback)] if callback is not None else []
    trainer = quiet_trainer(world, strategy=strategy, **{**defaults, "callbacks": callbacks, **options})
    if plain:
        trainer = pl.Trainer(
            strategy=SingleDeviceStrategy("cpu"), logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, precision="64-true", **{**defaults, **options},
        )  # fmt: skip
    if data == "stream":
        loader = DataLoader(Stream(model, size), batch_size=micro)
    else:
        loader = DataLoader(Numbered(size), batch_size=micro, shuffle=data == "shuffled")
    if save is not None and save_after is not None:
        model.save_after = save_after, save
    trainer.fit(model, loader, ckpt_path=resume)
    if save is not None and save_after is None:
        model.save(save, weights_only=weights_only)
    return {
        "losses": model.losses,
        "numbers": model.numbers,
        "saved": model.saved,
        "dp_rank": getattr(trainer.strategy, "data_parallel_rank", 0),
        "sp_rank": 0 if plain else trainer.strategy.sequence_mesh.sequence_rank,
        "weights": {n: _full(p.detach()).clone() for n, p in model.named_parameters()},
        "callback": {**callbacks[0].loaded, "now": callbacks[0].batches} if resume and callbacks else None,
        "step": trainer.global_step,
        "said": heard.stop(),
    }


def several(runs: list[dict[str, Any]]) -> list[Any]:
    """Train several runs one after the other; a refusal is returned as its message."""
    results: list[Any] = []
    for run in runs:
        try:
            results.append(train(**run))
        except SequenceParallelError as error:
            results.append(str(error))
    return results


def epoch_samples(world: int, strategy: dict[str, Any], path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train on SequenceShardingDataModule, save or resume; return the documents seen, by their first token."""
    pl.seed_everything(5, verbose=False)
    data = SequenceShardingDataModule(
        str(Path(path) / "*.txt"),
        sequence_length=24,
        held_out=0,
        micro_batch_size=options["micro"],
        global_batch_size=4,
        seed=3,
    )
    model = Trained(build=byte_gpt)
    trainer = quiet_trainer(
        world,
        strategy={**strategy, "preflight": "resume" not in options},
        max_steps=options["until"],
        max_epochs=-1,
        accumulate_grad_batches=options["accumulate"],
    )
    trainer.fit(model, datamodule=data, ckpt_path=options.get("resume"))
    if "save" in options:
        trainer.save_checkpoint(options["save"])
    return {"numbers": model.numbers, "sp_rank": trainer.strategy.sequence_mesh.sequence_rank}


def byte_gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=257, dim=16, num_layers=1, num_heads=4, max_positions=32))


def model_checkpoint(world: int, path: str) -> dict[str, Any]:
    """ModelCheckpoint with a monitor and last, EarlyStopping; then the same process fits, validates, tests and predicts from them."""
    pl.seed_everything(5, verbose=False)
    model = Trained()
    saver = ModelCheckpoint(path, "{epoch}-{val_loss:.6f}", monitor="val_loss", save_top_k=2, save_last=True)
    stopper = EarlyStopping("val_loss", patience=10)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saver, stopper], "num_sanity_val_steps": 1}
    trainer = quiet_trainer(world, strategy={"preflight": False}, max_epochs=3, **options)
    train_data, val_data = DataLoader(Numbered(4), batch_size=1), DataLoader(Numbered(2), batch_size=1)
    trainer.fit(model, train_data, val_data)
    files = sorted(each.name for each in Path(path).iterdir())
    best, best_score = float(trainer.callback_metrics["val_loss"]), float(saver.best_model_score or 0)
    measured = {
        how: trainer.validate(model, val_data, ckpt_path=how, verbose=False)[0]["val_loss"] for how in ("best", "last")
    }
    tested = trainer.test(model, val_data, ckpt_path="best", verbose=False)[0]["val_loss"]
    predictions = trainer.predict(model, val_data, ckpt_path="best")
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, train_data, val_data, ckpt_path="last")
    return {
        "files": files,
        "best_score": best_score,
        "last_val": best,
        "measured": measured,
        "tested": tested,
        "num_predictions": len(predictions or []),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "stopper": stopper.state_dict()["wait_count"],
    }


def hyper_parameters(world: int, path: str) -> dict[str, Any]:
    """Hyperparameters of OmegaConf and of any class: what the checkpoint holds, read back with torch's restrictive default."""
    pl.seed_everything(5, verbose=False)
    model = Trained()
    model.save_hyperparameters({"options": OmegaConf.create({"a": [1, 2], "b": {"c": "x"}}), "colour": Colour.RED})
    trainer = quiet_trainer(world, max_steps=1)
    loader = DataLoader(Numbered(4), batch_size=2)
    trainer.fit(model, loader)
    trainer.save_checkpoint(path)
    stored = torch.load(Path(path) / folder.META, weights_only=True)
    again = quiet_trainer(world, strategy={"preflight": False}, max_steps=2)
    again.fit(Trained(), loader, ckpt_path=path)
    return {"hyper_parameters": stored["hyper_parameters"], "step": again.global_step, "known": stored["lightning_sp"]}


def refusals(cases: list[tuple[str, str]]) -> list[str]:
    """Resume from bad checkpoints, each with options of the module; return the messages."""
    messages = []
    for path, module in cases:
        trainer = quiet_trainer(torch.distributed.get_world_size(), max_steps=4)
        try:
            trainer.fit(Trained(**json.loads(module or "{}")), DataLoader(Numbered(8), batch_size=2), ckpt_path=path)
            messages.append("NOT REFUSED")
        except SequenceParallelError as error:
            messages.append(str(error))
    return messages


def replaced(world: int, path: str) -> list[tuple[str, int]]:
    """Save to one path again and again, as folder, folder, file and folder; return what is there and the step it holds each time."""
    found = []
    for step, as_folder in enumerate((True, True, False, True), start=1):
        trainer = quiet_trainer(
            world, max_steps=step, strategy={"save_distributed_checkpoint": as_folder, "preflight": False}
        )
        trainer.fit(Trained(), DataLoader(Numbered(8), batch_size=1), ckpt_path=path if step > 1 else None)
        trainer.save_checkpoint(path)
        around = ",".join(sorted(each.name for each in Path(path).parent.iterdir()))
        found.append((f"{around} {'folder' if Path(path).is_dir() else 'file'}", trainer.global_step))
    return found


def save_refused(world: int, path: str, what: str) -> str:
    """Save where or what cannot be saved; return the message."""
    callbacks = [Counting(Colour.RED)] if what == "strange" else []
    trainer = quiet_trainer(world, strategy={"preflight": False}, max_steps=1, callbacks=callbacks)
    trainer.fit(Trained(), DataLoader(Numbered(4), batch_size=2))
    try:
        trainer.save_checkpoint(path, storage_options={"a": 1} if what == "storage" else None)
    except SequenceParallelError as error:
        return str(error)
    return "NOT REFUSED"
