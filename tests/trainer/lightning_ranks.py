"""What each rank runs in test_lightning.py: one run per feature of the Trainer, under plain Lightning and under ours; returns plain values."""

from __future__ import annotations

import csv
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from lightning_sp import SequenceParallelStrategy
from lightning_sp.callbacks import ThroughputMonitor
from tests.instruments.record import Record
from tests.trainer.tiny import Plain, TokenDataset, _full, tiny_llama


class User(Plain):
    """A module with everything that a user's has: validation, schedulers, manual optimization on request."""

    def __init__(self, scheduler: str = "", manual: bool = False, accumulate: int = 1) -> None:
        # What Lightning does around a step does not depend on how many layers it has.
        super().__init__(tiny_llama, lr=0.02)
        self.scheduler, self.accumulate = scheduler, accumulate
        self.automatic_optimization = not manual
        self.rates = Record()
        self.validated: list[dict[str, float]] = []
        self.mean = MeanMetric()  # in float32

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss / self.accumulate)
        if (batch_idx + 1) % self.accumulate == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return loss

    # Without batch_idx, as Lightning allows.
    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        self.mean.update(loss, weight=batch["shift_labels"].ne(-100).sum())
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["input_ids"]))

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", self.mean.compute())
        self.mean.reset()

    def on_validation_end(self) -> None:
        self.validated.append({n: float(v) for n, v in self.trainer.callback_metrics.items() if "val" in n})

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.scheduler == "one_cycle":
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        if self.scheduler == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_mean"}}
        return optimizer


class UserOfSeveral(User):
    """The same with several validation loaders, which ask for the full signature."""

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
        super().validation_step(batch)


def trainer_of(strategy: dict[str, Any] | None, world: int, **options: Any) -> pl.Trainer:
    """A Trainer of ours, or for None plain Lightning on one device."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    defaults: dict[str, Any] = dict(
        accelerator="cpu", devices=world, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, max_epochs=1, precision="64-true",
    )  # fmt: skip
    chosen: Any = "auto" if strategy is None else SequenceParallelStrategy(**strategy)
    return pl.Trainer(strategy=chosen, **{**defaults, **options})


def fitted(trainer: pl.Trainer, module: Plain) -> dict[str, Any]:
    """What a fit that was not refused has left: losses, whole weights, logged numbers."""
    weights = {n: _full(p.detach()).clone() for n, p in module.named_parameters()}
    logged = {n: float(v) for n, v in trainer.callback_metrics.items()}
    return {"error": "", "losses": module.losses, "weights": weights, "logged": logged}


def runs(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run several in one call."""
    return [run(**case) for case in cases]


def run(
    strategy: dict[str, Any] | None,
    world: int,
    module: dict[str, Any] | None = None,
    size: int = 10,
    micro: int = 2,
    val_loaders: int = 1,
    early_stopping: bool = False,
    folder: str = "",
    positions: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Fit, validate, and return what a user would look at."""
    torch.manual_seed(3)
    user = (User if val_loaders == 1 else UserOfSeveral)(**(module or {}))
    callbacks: list[Any] = []
    stopping = EarlyStopping("val_mean", patience=1, min_delta=10.0)
    if early_stopping:
        callbacks.append(stopping)
    logger: Any = False
    if folder:
        logger = CSVLogger(folder, name="", version="run", flush_logs_every_n_steps=1)
        best = ModelCheckpoint(folder, monitor="val_mean", filename="best", enable_version_counter=False)
        callbacks += [best, LearningRateMonitor("step")]
        options = dict(enable_checkpointing=True, log_every_n_steps=1) | options
    trainer = trainer_of(strategy, world, callbacks=callbacks, logger=logger, **options)
    validation = [DataLoader(TokenDataset(6 + i, 24), batch_size=2) for i in range(val_loaders)]
    trainer.fit(
        user, DataLoader(TokenDataset(size), batch_size=micro), validation[0] if val_loaders == 1 else validation
    )
    answer = {
        "losses": user.losses,
        "rates": user.rates,
        "validated": user.validated,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "stopped_epoch": stopping.stopped_epoch,
        "weights": {n: _full(p.detach()).clone() for n, p in user.named_parameters()},
    }
    if folder and trainer.is_global_zero:
        with (Path(folder) / "run" / "metrics.csv").open() as file:
            answer["csv"] = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
        answer["best"] = (Path(folder) / "best.ckpt").exists()
    return answer


def several_training_loaders(mode: str) -> str:
    """Fit from two loaders at once; without the global view; return the refusal."""
    loaders = {name: DataLoader(TokenDataset(4), batch_size=2) for name in ("text", "code")}
    try:
        trainer_of({"ring_size": 2, "global_view": False}, 2).fit(User(), CombinedLoader(loaders, mode))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


class Fetching(User):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)


def unsupported(feature: str) -> str:
    """Fit with a feature that cannot work; return the refusal."""
    try:
        trainer_of({"ring_size": 2}, 2).fit(
            Fetching() if feature == "dataloader_iter" else User(), DataLoader(TokenDataset(4), batch_size=2)
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def mean_of_ranks(strategy: dict[str, Any]) -> float:
    """Reduce this rank's number, an integer, to the mean."""
    return float(SequenceParallelStrategy(**strategy).reduce(torch.tensor(dist.get_rank()), reduce_op="mean"))


def tokens_seen(strategy: dict[str, Any], world: int, length: int, samples: int = 4) -> int:
    """Fit on a few samples, and return how many tokens the monitor counted."""
    monitor = ThroughputMonitor()
    trainer = trainer_of(strategy, world, callbacks=[monitor])
    trainer.fit(
        User(), DataLoader(TokenDataset(samples, length), batch_size=4 // strategy.get("data_parallel_size", 1))
    )
    return monitor.tokens_seen


class Sampled(User):
    """Counts samples by a metric over whole sequences, equal on all ranks that share one."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = SumMetric()

    def setup(self, stage: str) -> None:
        if hasattr(self.trainer.strategy, "data_parallel_group"):
            self.samples.process_group = self.trainer.strategy.data_parallel_group

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        super().validation_step(batch)
        self.samples.update(float(batch["shift_labels"].ne(-100).any(1).numel()))
        self.log("val_samples", self.samples)


def sample_metric(strategy: dict[str, Any] | None, world: int, size: int) -> dict[str, float]:
    """Validate with a metric of samples."""
    torch.manual_seed(3)
    loader = DataLoader(TokenDataset(size, 24), batch_size=1)
    found: Any = trainer_of(strategy, world).validate(Sampled(), loader, verbose=False)[0]
    return {name: float(value) for name, value in found.items()}
