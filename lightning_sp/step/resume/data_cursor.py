"""A run's data cursor: how far its training loader has come, what a checkpoint stores of that, and how a resumed run goes on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp.checkpoint.contents.plain import plain_checkpoint
from lightning_sp.data.loaders.own_state import KEPT_BY_CURSOR
from lightning_sp.data.resume import align_loops, check_epoch_end, check_global_batch, loader_cursor, resume_loader
from lightning_sp.mesh import SequenceMesh


class DataCursor:
    """One run's data cursor; a class because the steps of a run move it on."""

    def __init__(self) -> None:
        self._rows = 0
        self._epoch = 0
        self._resumed: dict[str, Any] | None = None
        self._said = False
        self._unchecked: dict[str, Any] | None = None  # of a resume, until the first micro-batch shows the global batch

    def note_micro_batch(self, rows: int, trainer: Any, mesh: SequenceMesh) -> None:
        """Remember what a checkpoint says of the data.

        Raises:
            SequenceParallelError: the first micro-batch after a resume does not make the stored global batch.
        """
        self._epoch, self._rows = trainer.current_epoch, max(self._rows, rows)
        if self._resumed is not None and self._resumed["kind"] == "read":
            self._resumed = None  # a loader that is made anew for a later epoch begins at its start
        if self._unchecked is not None:
            unchecked, self._unchecked = self._unchecked, None
            accumulation = int(trainer.accumulate_grad_batches)
            check_global_batch(unchecked, rows=rows, dp_size=mesh.data_parallel_size, accumulation=accumulation)

    def stored(self, trainer: Any, mesh: SequenceMesh) -> dict[str, Any]:
        """Return what a checkpoint stores of it, in plain values."""
        dp_size = mesh.data_parallel_size
        position = loader_cursor(trainer, epoch=self._epoch, rows=self._rows, dp_size=dp_size)
        if position is not None and (own := position.get("own_states")) is not None:
            position["own_states"] = self._plain(own)
        return {
            "position": position,
            "global_batch_size": self._rows * int(trainer.accumulate_grad_batches) * dp_size,
        }

    @staticmethod
    def drop_marks(checkpoint: Mapping[str, Any]) -> None:
        """Take out that our loaders have a state, kept by the cursor: plain Lightning's have none, and it would refuse the checkpoint."""
        state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if all(each == KEPT_BY_CURSOR for each in state.get("combined_loader", ())):
            state.pop("combined_loader", None)

    def _plain(self, states: list[Any]) -> list[Any] | None:
        """Return the states that loaders keep of themselves, None where they would not load again; equal on all ranks."""
        _, refused, _ = plain_checkpoint({"state_dict": states})
        if refused and not self._said:
            self._said = True
            rank_zero_warn(
                f"the training loader's own state is not stored, for it is no plain value ({refused[0]}): a resume within an epoch reads the "
                "loader again from the epoch's start; return numbers, strings, tensors and containers of these from its state_dict"
            )
        return None if refused else states

    def resume(self, cursor: dict[str, Any] | None, fit_loop: dict[str, Any], trainer: Any, *, dp_size: int) -> None:
        """Continue at a stored cursor: Lightning's counters now, loaders that exist now, others when they come.

        Raises:
            SequenceParallelError: a run at these degrees, or from these loaders, cannot go on there.
        """
        self._resumed = cursor
        if cursor is None:
            check_epoch_end(fit_loop, trainer)
            return
        align_loops(cursor, fit_loop, trainer, dp_size=dp_size)
        self._unchecked = cursor if cursor["kind"] == "read" and not cursor["begins_epoch"] else None
        # Reading `estimated_stepping_batches` in configure_optimizers makes the loader before the checkpoint is read.
        for loader in trainer.fit_loop._combined_loader.flattened if trainer.fit_loop._combined_loader else ():
            resume_loader(loader, cursor)

    def resume_loader(self, loader: Any) -> None:
        """Set a new training loader to the stored cursor, if there is one."""
        if self._resumed is not None:
            resume_loader(loader, self._resumed)

    def end_of_run(self) -> None:
        """Forget the cursor that the run was resumed at."""
        self._resumed = self._unchecked = None
