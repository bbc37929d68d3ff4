"""What a resume needs besides Lightning's own state: the data position, and each rank's random streams.

    stored: degrees, seed, step, every rank's random states, the training loader's position, the global batch size

At equal degrees each rank goes on with its own streams; at others every rank's is derived from (seed, step, dp rank, sp rank).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from lightning_sp import comm
from lightning_sp.checkpoint import derived_seed, random_state, restore_random_state
from lightning_sp.context.dropout import DropoutSource
from lightning_sp.data.resume import align_loops, check_epoch_end, check_global_batch, loader_position, resume_loader
from lightning_sp.mesh import SequenceMesh


class RunState:
    """One run's place in its data and random streams; a class because the steps of a run move it on."""

    def __init__(self) -> None:
        self._seed = 0
        self._rows = 0
        self._epoch = 0
        self._position: dict[str, Any] | None = None
        self._global_batch_due: dict[str, Any] | None = None
        self._random_due: dict[str, Any] | None = None
        self._window = (-1, 0)  # optimizer step in progress, and its micro-batches so far

    def seed_ranks(self, seed: int, step: int, mesh: SequenceMesh) -> None:
        """Give every rank its own stream of elementwise dropout, derived from rank 0's seed; one process keeps its own."""
        self._seed, self._window = seed, (-1, 0)
        if mesh.base.size() > 1:
            torch.manual_seed(derived_seed(seed, step, _place(mesh)))

    def note_micro_batch(self, rows: int, trainer: Any, mesh: SequenceMesh) -> None:
        """Remember what a checkpoint says of the data; after a resume, check it and go on with the stored random states."""
        self._epoch, self._rows = trainer.current_epoch, max(self._rows, rows)
        if self._global_batch_due is not None:
            due, self._global_batch_due = self._global_batch_due, None
            accumulation = int(trainer.accumulate_grad_batches)
            check_global_batch(due, rows=rows, dp_size=mesh.data_parallel_size, accumulation=accumulation)
        if self._random_due is not None:
            # Again: making the loader's iterator has drawn from it, which the uninterrupted run did not.
            restore_random_state(self._random_due)
            self._random_due = None

    def dropout_source(self, rows: int, step: int, mesh: SequenceMesh) -> DropoutSource:
        """Return what attention dropout is drawn by in the micro-batch that was noted last.

        A sample's number is its place in the optimizer step's global batch, as `data.order` deals it out: however the batch is cut into
        micro-batches and data-parallel groups, a sample keeps its masks.
        """
        begun, micro = self._window
        micro = micro if begun == step else 0
        self._window = (step, micro + 1)
        # By the most rows of a micro-batch: the last one of an epoch may be short.
        first = (micro * mesh.data_parallel_size + mesh.data_parallel_rank) * self._rows
        return DropoutSource(self._seed, step, first + torch.arange(rows))

    def stored(
        self, trainer: Any, mesh: SequenceMesh, shard_size: int, group: dist.ProcessGroup | None
    ) -> dict[str, Any]:
        """Return the state to store, in plain values. Communicates: every rank's random states, gathered over `group`."""
        dp_size = mesh.data_parallel_size
        return {
            "format": 1,
            "degrees": _degrees(mesh),
            "shard_size": shard_size,
            "seed": self._seed,
            "step": trainer.global_step,
            "random": comm.gather_objects(random_state(), group),
            "position": loader_position(trainer, epoch=self._epoch, rows=self._rows, dp_size=dp_size),
            "global_batch_size": self._rows * int(trainer.accumulate_grad_batches) * dp_size,
        }

    def resume_position(
        self, position: dict[str, Any] | None, fit_loop: dict[str, Any], trainer: Any, *, dp_size: int
    ) -> None:
        """Continue at a stored position: Lightning's counters now, loaders that exist now, others when they come.

        Raises:
            SequenceParallelError: the position cannot be taken up at these degrees, or from these loaders.
        """
        self._position = position
        if position is None:
            check_epoch_end(fit_loop, trainer)
            return
        align_loops(position, fit_loop, trainer, dp_size=dp_size)
        self._global_batch_due = position if position["kind"] == "read" else None
        # Reading `estimated_stepping_batches` in configure_optimizers makes the loader before the checkpoint is read.
        for loader in trainer.fit_loop._combined_loader.flattened if trainer.fit_loop._combined_loader else ():
            resume_loader(loader, position)

    def resume_loader(self, loader: Any) -> None:
        """Set a new training loader to the stored position, if there is one."""
        if self._position is not None:
            resume_loader(loader, self._position)

    def restore_random(self, stored: dict[str, Any] | None, trainer: Any, mesh: SequenceMesh) -> None:
        """Go on with each rank's random states at equal degrees, else with streams derived from the stored seed."""
        loop = trainer.fit_loop
        if stored is None:
            self.seed_ranks(self._seed, trainer.global_step, mesh)
            return
        self._seed, degrees = stored["seed"], _degrees(mesh)
        if stored["degrees"] == degrees:
            state = stored["random"][mesh.base.get_rank()]
            restore_random_state(state)
            epochs: Any = loop.epoch_progress.current
            batches = loop.epoch_loop.batch_progress
            within_epoch = epochs.ready > epochs.processed and batches.current.ready > 0 and not batches.is_last_batch
            self._random_due = state if within_epoch else None
            return
        torch.manual_seed(derived_seed(self._seed, stored["step"], _place(mesh)))
        was, now = (", ".join(f"{name} {size}" for name, size in each.items()) for each in (stored["degrees"], degrees))
        rank_zero_info(
            f"sequence_parallel: the checkpoint is of {was}; this run of {now} draws its random numbers (dropout) from streams derived from "
            f"(seed {self._seed}, step {stored['step']}, data-parallel rank, sequence-parallel rank)"
        )

    def end_of_run(self) -> None:
        """Forget what a checkpoint had left to take up."""
        self._position = self._global_batch_due = self._random_due = None


def _place(mesh: SequenceMesh) -> int:
    """Return this rank's number among all, samples first."""
    return mesh.data_parallel_rank * mesh.layout.size + mesh.sequence_rank


def _degrees(mesh: SequenceMesh) -> dict[str, int]:
    layout = mesh.layout
    return {
        "data_parallel_size": mesh.data_parallel_size,
        "ring_size": layout.ring_size,
        "ulysses_size": layout.ulysses_size,
    }
