"""The random streams of each rank: derived from one seed, stored with a checkpoint, restored or derived anew by a resume.

At equal degrees each rank goes on with its own streams; at others every rank's is derived from (seed, step, dp rank, sp rank).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.checkpoint import derived_seed, random_state, restore_random_state
from lightning_sp.context.dropout import DropoutSource
from lightning_sp.context.streams import mixed_seed
from lightning_sp.mesh import SequenceMesh


class RandomStreams:
    """One run's random streams on this rank; a class because the steps of a run move them on."""

    def __init__(self) -> None:
        self._seed = 0
        self._rows = 0
        self._window = (-1, 0)  # optimizer step in progress, and its micro-batches so far
        self._alike: dict[
            str, tuple[int, int]
        ] = {}  # optimizer step of a stage's last batch, and its batches in that step so far
        self._restored: dict[str, Any] | None = None  # by a resume, until the first micro-batch

    def start_run(self, step: int, mesh: SequenceMesh) -> None:
        """Begin with rank 0's seed. Communicates: one broadcast of it."""
        self.seed_ranks(int(comm.broadcast_object(torch.initial_seed(), None)), step, mesh)

    def share_seed(self) -> None:
        """Take rank 0's seed for what ranks draw alike in a run without training. Communicates: one broadcast of it."""
        self._seed = int(comm.broadcast_object(torch.initial_seed(), None))

    def alike(self, stage: str, step: int, mesh: SequenceMesh) -> int:
        """Return the seed of what the ranks of a sequence draw alike in the next batch: another in each data-parallel group and batch.

        Args:
            stage: of the Trainer. What validation draws does not move training's.
            step: optimizer steps done.
            mesh: with this rank's data-parallel group.
        """
        begun, count = self._alike.get(stage, (-1, 0))
        count = count if begun == step else 0
        self._alike[stage] = (step, count + 1)
        return mixed_seed(self._seed, step, count, mesh.data_parallel_rank, *stage.encode())

    def seed_ranks(self, seed: int, step: int, mesh: SequenceMesh) -> None:
        """Give every rank its own stream of elementwise dropout, derived from rank 0's seed; one process keeps its own."""
        self._seed, self._window, self._alike = seed, (-1, 0), {}
        if mesh.base.size() > 1:
            torch.manual_seed(derived_seed(seed, step, _number_of_rank(mesh)))

    def begin_micro_batch(self) -> None:
        """After a resume go on with the stored random states."""
        if self._restored is not None:
            # Again: making the loader's iterator has drawn from it, which the uninterrupted run did not.
            restore_random_state(self._restored)
            self._restored = None

    def dropout_source(self, rows: int, step: int, mesh: SequenceMesh, device: torch.device) -> DropoutSource:
        """Return what attention dropout is drawn by in the next micro-batch of an optimizer step.

        A sample's number is its position in the optimizer step's global batch, as `data.order` deals it out: however the batch is cut into
        micro-batches and data-parallel groups, a sample keeps its masks.
        """
        self._rows = max(self._rows, rows)
        begun, micro = self._window
        micro = micro if begun == step else 0
        self._window = (step, micro + 1)
        # By the most rows of a micro-batch: the last one of an epoch may be short.
        first = (micro * mesh.data_parallel_size + mesh.data_parallel_rank) * self._rows
        samples = torch.arange(first, first + rows, device=device)
        return DropoutSource(self._seed, step, samples, micro_batch=micro)

    def stored(self, step: int, mesh: SequenceMesh, group: ProcessGroup | None) -> dict[str, Any]:
        """Return what a checkpoint stores of them, in plain values. Communicates: every rank's random states, gathered over `group`."""
        return {
            "degrees": _degrees(mesh),
            "seed": self._seed,
            "step": step,
            "random": comm.gather_objects(random_state(), group),
        }

    def restore(self, stored: dict[str, Any] | None, trainer: Any, mesh: SequenceMesh) -> None:
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
            self._restored = state if within_epoch else None
            return
        torch.manual_seed(derived_seed(self._seed, stored["step"], _number_of_rank(mesh)))
        was, now = _described(stored["degrees"]), _described(degrees)
        rows = stored.get("global_batch_size")
        rank_zero_info(
            f"sequence_parallel: the checkpoint is of {was}{f', of {rows} rows a step' if rows else ''}; this run of {now} goes on from step "
            f"{stored['step']} and draws its random numbers (dropout) from streams derived from (seed {self._seed}, step {stored['step']}, "
            "data-parallel rank, sequence-parallel rank)"
        )

    def end_of_run(self) -> None:
        """Forget the states of a resume that no micro-batch has followed."""
        self._restored = None


def _number_of_rank(mesh: SequenceMesh) -> int:
    """Count the ranks, those of one sequence side by side."""
    return mesh.data_parallel_rank * mesh.layout.size + mesh.sequence_rank


def _described(degrees: dict[str, int]) -> str:
    ranks = math.prod(degrees.values())
    return f"{ranks} rank{'s' * (ranks > 1)} ({', '.join(f'{name} {size}' for name, size in degrees.items())})"


def _degrees(mesh: SequenceMesh) -> dict[str, int]:
    layout, tensor = mesh.layout, mesh.tensor_parallel_size
    return {
        "data_parallel_size": mesh.data_parallel_size,
        "ring_size": layout.ring_size,
        "ulysses_size": layout.ulysses_size,
        **({"tensor_parallel_size": tensor} if tensor > 1 else {}),
    }
