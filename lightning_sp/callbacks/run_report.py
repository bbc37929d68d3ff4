"""What a run did, said once at its end: a table, a picture and a small JSON file in the run's folder.

It measures nothing itself: throughput and memory come from their callbacks, the metrics from Lightning's CSV.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_sp.callbacks.memory import GIB, MemoryMonitor
from lightning_sp.callbacks.picture import draw_run
from lightning_sp.callbacks.throughput import ThroughputMonitor
from lightning_sp.errors import SequenceParallelError


@dataclass(frozen=True)
class RunSummary:
    """The numbers of a run; None where nothing measured it."""

    mesh: str
    steps: int
    tokens_seen: int | None
    tokens_per_s: float | None
    peak_memory_bytes: list[int]
    memory_kind: str
    perplexity_before: float | None
    perplexity_after: float | None
    perplexity_step: int
    unigram_perplexity: float | None
    folder: str
    checkpoint: str | None
    resume: str | None

    @property
    def ratio_to_unigram(self) -> float | None:
        """The last validation perplexity as a share of the unigram's."""
        if self.perplexity_after is None or self.unigram_perplexity is None:
            return None
        return self.perplexity_after / self.unigram_perplexity

    def table(self) -> Table:
        """Lay the numbers out."""
        table = Table(title="What this run did", show_header=False, title_style="bold", min_width=60)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("mesh", self.mesh)
        if self.tokens_seen is not None:
            table.add_row("tokens", f"{self.tokens_seen:,} in {self.steps:,} optimizer steps")
        table.add_row("tokens/s", "too few steps to measure" if not self.tokens_per_s else f"{self.tokens_per_s:,.0f}")
        if self.peak_memory_bytes:
            peaks = ", ".join(f"{rank}: {peak / GIB:.2f}" for rank, peak in enumerate(self.peak_memory_bytes))
            table.add_row("peak memory", f"GiB of rank {peaks} ({self.memory_kind})")
        table.add_row("val perplexity", self._perplexities())
        table.add_row("files", self.folder)
        table.add_row("checkpoint", self.checkpoint or "none written")
        if self.resume:
            table.add_row("resume", self.resume)
        return table

    def _perplexities(self) -> str:
        before = "not measured" if self.perplexity_before is None else f"{self.perplexity_before:.2f}"
        after = "not measured" if self.perplexity_after is None else f"{self.perplexity_after:.2f}"
        text = f"{before} before, {after} after {self.perplexity_step:,} steps"
        if self.unigram_perplexity is not None:
            text += f"; the unigram's is {self.unigram_perplexity:.2f}"
        if self.ratio_to_unigram is not None:
            text += f" (ratio {self.ratio_to_unigram:.2f})"
        return text


class RunReport(Callback):
    """Write ``summary.json`` and ``report.png`` into the run's folder and print one table, on rank 0 at the fit's end.

    The perplexity before training is the sanity check's, when that covered every validation batch
    (``num_sanity_val_steps=-1``).

    Args:
        folder: Where to write. The trainer's ``log_dir`` when not given.
        resume_command: How to go on from the last checkpoint; ``{checkpoint}`` and ``{max_steps}`` are filled in.
        monitor: Name under which the module logs its validation perplexity.
    """

    def __init__(
        self, folder: str | None = None, resume_command: str | None = None, monitor: str = "val_perplexity"
    ) -> None:
        self.folder = folder
        self.resume_command = resume_command
        self.monitor = monitor
        self.summary: RunSummary | None = None
        self._perplexity_before: float | None = None
        self._perplexity_after: float | None = None
        self._perplexity_step = 0

    @override
    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the untrained model's perplexity and log it at step 0."""
        if list(trainer.num_sanity_val_batches) != list(trainer.num_val_batches):
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._perplexity_before = metrics.get(self.monitor)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=0)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the newest perplexity."""
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
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what the stopped run measured."""
        self._perplexity_before = state_dict["perplexity_before"]
        self._perplexity_after = state_dict["perplexity_after"]
        self._perplexity_step = state_dict["perplexity_step"]

    @override
    @rank_zero_only
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the files and print the table."""
        if getattr(trainer, "fast_dev_run", False):
            return
        folder = Path(self.folder or trainer.log_dir or trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.summary = self._summarise(trainer, folder)
        (folder / "summary.json").write_text(json.dumps(asdict(self.summary), indent=2) + "\n")
        self._draw(trainer, folder)
        Console().print(self.summary.table())

    def _summarise(self, trainer: Trainer, folder: Path) -> RunSummary:
        throughput = next((c for c in _callbacks(trainer) if isinstance(c, ThroughputMonitor)), None)
        memory = next((c for c in _callbacks(trainer) if isinstance(c, MemoryMonitor)), None)
        checkpoint = _last_checkpoint(trainer)
        unigram = getattr(getattr(trainer, "datamodule", None), "unigram_perplexity", None)
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
            unigram_perplexity=float(unigram()) if callable(unigram) and self._perplexity_after is not None else None,
            folder=str(folder),
            checkpoint=checkpoint,
            resume=self._resume(trainer, checkpoint),
        )

    def _resume(self, trainer: Trainer, checkpoint: str | None) -> str | None:
        if checkpoint is None or self.resume_command is None:
            return None
        # A finished run has no step left: the command asks for as many again.
        return self.resume_command.format(checkpoint=checkpoint, max_steps=2 * trainer.global_step)

    def _draw(self, trainer: Trainer, folder: Path) -> None:
        assert self.summary is not None
        logger = next((logger for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)
        if logger is None:
            rank_zero_warn(
                "RunReport draws no picture: it reads the metrics of Lightning's CSVLogger, and there is none"
            )
            return
        logger.save()
        try:
            draw_run(
                Path(logger.log_dir) / "metrics.csv",
                folder / "report.png",
                title=f"{self.summary.mesh}, {self.summary.steps:,} steps",
                peak_bytes_of_ranks=self.summary.peak_memory_bytes,
                memory_kind=self.summary.memory_kind,
            )
        except SequenceParallelError as error:
            rank_zero_warn(f"RunReport draws no picture: {error}")


def describe_mesh(trainer: Trainer) -> str:
    """Return the degrees in one line: dp x ring x ulysses under the sequence-parallel strategy, else the processes."""
    mesh = getattr(trainer.strategy, "mesh", None)
    describe = getattr(mesh, "describe", None)
    if callable(describe):
        return str(describe())
    count = trainer.world_size
    return f"{count} process{'es' if count > 1 else ''}, {type(trainer.strategy).__name__}"


def _callbacks(trainer: Trainer) -> list[Callback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def _last_checkpoint(trainer: Trainer) -> str | None:
    callback = trainer.checkpoint_callback
    path = getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "")
    return str(path) or None
