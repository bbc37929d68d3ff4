"""What a run did, reported once at its end: a table, a picture and a small JSON file in the run's folder.

It measures nothing itself: throughput and memory come from their callbacks, the metrics from Lightning's CSV.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from rich.console import Console
from torch import Tensor
from typing_extensions import override

from lightning_sp.callbacks.label_counts import add_counts, sum_counts
from lightning_sp.callbacks.memory import MemoryMonitor
from lightning_sp.callbacks.plot import draw_run
from lightning_sp.callbacks.resume_command import IN_PYTHON, fill_resume_command
from lightning_sp.callbacks.summary import RunSummary
from lightning_sp.callbacks.throughput import ThroughputMonitor
from lightning_sp.errors import SequenceParallelError
from lightning_sp.strategy import SequenceParallelStrategy
from lightning_sp.text.unigram import unigram_perplexity


class RunReport(Callback):
    """Write ``summary.json`` and ``report.png`` into the run's folder and print one table, on rank 0 at the fit's end.

    The perplexity before training is the sanity check's, when that covered every validation batch
    (``num_sanity_val_steps=-1``). The unigram's is that of the validated labels' own frequencies: no model that sees one
    token at a time does better on them.

    Paths and the command that continues the run stand below the table, each on a line of its own, to be copied. They are relative to the folder
    in which the program was started.

    Communicates: after the first validation, two all-reduces, of one number and of one per token id.

    Args:
        folder: Where to write. The trainer's ``log_dir`` when not given.
        resume_command: How to go on from the last checkpoint; ``{checkpoint}``, ``{folder}`` and ``{max_steps}``
            are filled in. The call in Python when not given.
        monitor: Name under which the module logs its validation perplexity.
    """

    def __init__(
        self, folder: str | None = None, resume_command: str | None = None, monitor: str = "val_perplexity"
    ) -> None:
        self.folder = folder
        self.resume_command = resume_command
        self.monitor = monitor
        self.start_folder = os.getcwd()  # printed paths are relative to it
        self.summary: RunSummary | None = None
        self._perplexity_before: float | None = None
        self._perplexity_after: float | None = None
        self._perplexity_step = 0
        self._unigram_perplexity: float | None = None
        self._label_counts: Tensor | None = None
        self._log_dir: str | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask for the folder on every rank: Lightning broadcasts its name."""
        self._log_dir = trainer.log_dir

    @override
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the untrained model's perplexity and log it at step 0."""
        if list(trainer.num_sanity_val_batches) != list(trainer.num_val_batches):
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._perplexity_before = metrics.get(self.monitor)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=0)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count this rank's labels, once: during the first validation."""
        labels = batch.get("shift_labels") if isinstance(batch, dict) else None
        if self._unigram_perplexity is None and isinstance(labels, Tensor):
            counts = torch.bincount(labels[labels >= 0])
            self._label_counts = counts if self._label_counts is None else add_counts(self._label_counts, counts)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the newest perplexity; after the first validation, the unigram's."""
        if self._label_counts is not None:
            counts = sum_counts(trainer, self._label_counts)
            self._label_counts, self._unigram_perplexity = None, unigram_perplexity(counts)
        value = trainer.callback_metrics.get(self.monitor)
        if value is not None and not trainer.sanity_checking:
            self._perplexity_after, self._perplexity_step = float(value), trainer.global_step

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run cannot measure any more."""
        return {
            "perplexity_before": self._perplexity_before,
            "perplexity_after": self._perplexity_after,
            "perplexity_step": self._perplexity_step,
            "unigram_perplexity": self._unigram_perplexity,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what the stopped run measured."""
        self._perplexity_before = state_dict["perplexity_before"]
        self._perplexity_after = state_dict["perplexity_after"]
        self._perplexity_step = state_dict["perplexity_step"]
        self._unigram_perplexity = state_dict["unigram_perplexity"]

    @override
    @rank_zero_only
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the files and print the table."""
        if getattr(trainer, "fast_dev_run", False):
            return
        folder = Path(self.folder or self._log_dir or trainer.default_root_dir).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self.summary = self._summarise(trainer, folder)
        (folder / "summary.json").write_text(json.dumps(asdict(self.summary), indent=2) + "\n")
        self._draw(trainer, folder)
        Console().print(self.summary.table())
        for line in self.summary.lines(self.start_folder):
            print(line)  # not by rich, which would wrap it

    def _summarise(self, trainer: Trainer, folder: Path) -> RunSummary:
        throughput = next((c for c in _callbacks(trainer) if isinstance(c, ThroughputMonitor)), None)
        memory = next((c for c in _callbacks(trainer) if isinstance(c, MemoryMonitor)), None)
        checkpoint = _last_checkpoint(trainer)
        return RunSummary(
            mesh=describe_mesh(trainer),
            steps=trainer.global_step,
            tokens_seen=throughput.tokens_seen if throughput else None,
            tokens_per_s=throughput.mean_tokens_per_s if throughput else None,
            peak_memory_bytes=memory.peak_bytes_of_ranks if memory else [],
            memory_kind=memory.description if memory else "",
            perplexity_before=self._perplexity_before,
            perplexity_after=self._perplexity_after,
            perplexity_step=self._perplexity_step,
            unigram_perplexity=self._unigram_perplexity,
            folder=str(folder),
            checkpoint=checkpoint,
            resume=self._resume(trainer, checkpoint, folder),
        )

    def _resume(self, trainer: Trainer, checkpoint: str | None, folder: Path) -> str | None:
        if checkpoint is None:
            return None
        return fill_resume_command(
            self.resume_command or IN_PYTHON,
            checkpoint=checkpoint,
            folder=str(folder),
            max_steps=2 * trainer.global_step,  # a finished run has no step left: as many again
        )

    def _draw(self, trainer: Trainer, folder: Path) -> None:
        assert self.summary is not None
        logger = next((logger for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)
        if logger is None:
            rank_zero_warn(
                "RunReport draws no picture: it reads the metrics of Lightning's CSVLogger, and there is none"
            )
            return
        logger.save()
        metrics = Path(logger.log_dir) / "metrics.csv"
        if not metrics.is_file():
            rank_zero_warn("RunReport draws no picture: the run logged nothing, for it had no step left to train")
            return
        try:
            draw_run(
                metrics,
                folder / "report.png",
                title=f"{self.summary.mesh}, {self.summary.steps:,} steps",
                peak_bytes_of_ranks=self.summary.peak_memory_bytes,
                memory_kind=self.summary.memory_kind,
            )
        except SequenceParallelError as error:
            rank_zero_warn(f"RunReport draws no picture: {error}")


def describe_mesh(trainer: Trainer) -> str:
    """Return the degrees in one line: dp x ring x ulysses under the sequence-parallel strategy, else the processes."""
    if isinstance(trainer.strategy, SequenceParallelStrategy):
        return trainer.strategy.sequence_mesh.describe()
    count = trainer.world_size
    return f"{count} process{'es' if count > 1 else ''}, {type(trainer.strategy).__name__}"


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def _last_checkpoint(trainer: Trainer) -> str | None:
    callback = trainer.checkpoint_callback
    path = getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "")
    return os.path.abspath(path) if path else None
