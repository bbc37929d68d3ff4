"""Loggers, profilers, progress bars and other watchers."""

from __future__ import annotations

import csv
from typing import Any

import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.model_summary import summarize

from tests.trainer.behaviours.harness import Run, behaviour
from tests.trainer.behaviours.users import User, fitted


@behaviour
def csv_logger(run: Run) -> dict[str, Any]:
    logger = CSVLogger(run.folder, name="", version="run", flush_logs_every_n_steps=1)
    monitor = callbacks.LearningRateMonitor("step")
    answer = fitted(run, validation=True, logger=logger, callbacks=[monitor], log_every_n_steps=1, max_epochs=2)
    with (run.folder / "run" / "metrics.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return {**answer, "rows": rows}


@behaviour
def csv_logger_hyperparameters(run: Run) -> dict[str, Any]:
    class Keeps(User):
        def __init__(self, width: int = 3, name: str = "x") -> None:
            super().__init__()
            self.save_hyperparameters()

    logger = CSVLogger(run.folder, name="", version="run")
    answer = fitted(run, Keeps(4), logger=logger, log_every_n_steps=1)
    return {**answer, "kept": (run.folder / "run" / "hparams.yaml").read_text()}


@behaviour
def learning_rate_monitor(run: Run) -> dict[str, Any]:
    logger = CSVLogger(run.folder, name="", version="run")
    monitor = callbacks.LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    return fitted(run, logger=logger, callbacks=[monitor], log_every_n_steps=1)


@behaviour
def log_every_n_steps(run: Run) -> dict[str, Any]:
    logger = CSVLogger(run.folder, name="", version="run", flush_logs_every_n_steps=1)
    answer = fitted(run, logger=logger, log_every_n_steps=3, max_epochs=2)
    return {**answer, "rows": (run.folder / "run" / "metrics.csv").read_text().count("\n")}


def _profiled(run: Run, profiler: Any) -> dict[str, Any]:
    answer = fitted(run, profiler=profiler, max_steps=3)
    own = f"fit-*-{dist.get_rank()}.txt" if run.world > 1 else "fit-*.txt"  # each rank has a file of its own
    return {**answer, "files": [each.stat().st_size > 0 for each in run.folder.glob(own)]}


@behaviour
def profiler_simple(run: Run) -> dict[str, Any]:
    return _profiled(run, SimpleProfiler(run.folder, "simple"))


@behaviour
def profiler_advanced(run: Run) -> dict[str, Any]:
    return _profiled(run, AdvancedProfiler(run.folder, "advanced"))


@behaviour
def profiler_pytorch(run: Run) -> dict[str, Any]:
    return _profiled(run, PyTorchProfiler(run.folder, "pytorch", export_to_chrome=False))


@behaviour
def progress_bar_tqdm(run: Run) -> dict[str, Any]:
    bar = callbacks.TQDMProgressBar()
    return fitted(run, validation=True, enable_progress_bar=True, callbacks=[bar])


@behaviour
def progress_bar_rich(run: Run) -> dict[str, Any]:
    bar = callbacks.RichProgressBar()
    return fitted(run, validation=True, enable_progress_bar=True, callbacks=[bar])


@behaviour
def model_summary(run: Run) -> dict[str, Any]:
    class Summed(User):
        def on_train_start(self) -> None:
            told = summarize(self, max_depth=2)
            self.seen.append((told.total_parameters, told.trainable_parameters, round(told.model_size, 6)))

    return fitted(run, Summed(), callbacks=[callbacks.RichModelSummary(2)], enable_model_summary=True)


@behaviour
def device_stats(run: Run) -> dict[str, Any]:
    logger = CSVLogger(run.folder, name="", version="run")
    return fitted(run, logger=logger, callbacks=[callbacks.DeviceStatsMonitor()], log_every_n_steps=1)


@behaviour
def throughput_monitor(run: Run) -> dict[str, Any]:
    logger = CSVLogger(run.folder, name="", version="run")
    each = callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch["input_ids"]))
    return fitted(run, logger=logger, callbacks=[each])
