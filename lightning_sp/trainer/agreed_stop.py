"""Ranks leave a fit together, or say on all of them that they would not: `trainer.should_stop` is a rank's own number.

    rank 0    batch 3 ... batch 4's message: goes on             refused, on both
    rank 1    batch 3, should_stop = True: "the end of a batch"  refused, on both

Lightning's loops read it behind each batch, each validation and each epoch. A rank that it stops would save and end while the others wait for
it in the next batch.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.mesh import SequenceMesh
from lightning_sp.trainer.hooks.replaced_hooks import ReplacedHooks
from lightning_sp.trainer.loops import decided_by


class AgreedStop:
    """Compares whether ranks go on; a class because what it puts in the loops' place is put back."""

    def __init__(self) -> None:
        self._replaced = ReplacedHooks()

    def follow(self, trainer: Trainer, mesh: SequenceMesh, group: ProcessGroup | None) -> None:
        """Compare in a trainer's fits until `release`: behind a batch that a validation or the epoch's end follows, or that stops this rank,
        behind a validation, and where a fit ends. Where a rank skips the rest of an epoch all are to come together.

        Args:
            trainer: of the run.
            mesh: this rank's coordinates.
            group: the world, on a backend for host tensors.
        """
        self.release()
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        advance, end_batch, end_fit = epoch.advance, epoch.on_advance_end, fit.on_run_end

        def compare(comes_next: str, told: dict[str, Any]) -> None:
            _compare({"what comes next": comes_next, **told}, mesh, group)

        def advance_together(data_fetcher: Any) -> None:
            try:
                advance(data_fetcher)
            except StopIteration:
                _leave_epoch_together()
                raise

        def on_advance_end(data_fetcher: Any) -> None:
            validates = epoch._should_check_val_fx(data_fetcher)
            if validates or trainer.should_stop or epoch.batch_progress.is_last_batch:
                compare("the end of a batch", decided_by(trainer))
            end_batch(data_fetcher)
            if validates:
                compare("the end of a validation", decided_by(trainer))

        def on_run_end() -> None:
            # Not whether it was stopped: one that all have ended has harmed nobody.
            compare("the end of the fit", {})
            end_fit()

        self._replaced.replace(epoch, "advance", advance_together)
        self._replaced.replace(epoch, "on_advance_end", on_advance_end)
        self._replaced.replace(fit, "on_run_end", on_run_end)

    def release(self) -> None:
        """Give the loops their own."""
        self._replaced.release()


def _leave_epoch_together() -> None:
    """Wait for all ranks where a hook skips the rest of an epoch, say: one that does so alone is told by this function's name."""
    comm.come_together()


def _compare(told: dict[str, Any], mesh: SequenceMesh, group: ProcessGroup | None) -> None:
    """Raise on all ranks where some come to something else, the next batch say. Communicates: as for a batch."""
    comm.check_same_batch(
        None, digest=0, data_parallel_rank=mesh.data_parallel_rank, num_ring_passes=mesh.num_ring_passes, num_groups=mesh.data_parallel_size,
        loop=told, group=group,
    )  # fmt: skip
