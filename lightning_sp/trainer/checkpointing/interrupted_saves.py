"""What a save that was stopped has left: a checkpoint without its name, which a run that begins beside it would overwrite; a half one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.checkpoint import Address, located, recover, remnants, unfinished
from lightning_sp.errors import SequenceParallelError


def check_interrupted_saves(trainer: Any, group: ProcessGroup | None) -> None:
    """Give checkpoints back the names that a save was stopped in replacing, and refuse to begin beside them. Every rank must call it.

    Lightning has looked for `ckpt_path="last"` before: it has found none, and would begin at step 0. A fit from a checkpoint goes on. What is
    half-written, or was replaced, is named: it may be deleted, unless another run is writing it.

    Args:
        trainer: of a fit, its callbacks set up.
        group: the world, on a backend for host objects.

    Communicates: agreement on the error.

    Raises:
        SequenceParallelError: there were such checkpoints, which have their names again; or the run's checkpoints cannot be written where
            they are to be.
    """
    _check_addresses(trainer)
    error = None
    if comm.rank_in(group or comm.world()) == 0:
        folders = sorted({place for each in _dirpaths(trainer) if isinstance(place := located(each), Path)})
        if half := [str(path) for folder in folders for path in unfinished(folder)]:
            rank_zero_info(
                f"sequence_parallel: {len(half)} checkpoints are left by saves that were stopped, half-written, or replaced and not yet "
                f"deleted: {', '.join(half)}; delete them, if no other run is writing them"
            )
        begins = trainer.ckpt_path is None
        said = [line for folder in folders if begins for path in remnants(folder) if (line := recover(path))]
        if said:
            error = (
                f"a save that was stopped had left {len(said)} checkpoints without their names, and this run begins without one: "
                f"{'; '.join(said)}; it has its name again: start once more, with ckpt_path='last' to go on from it"
            )
    comm.agree(error, group)


def _dirpaths(trainer: Any) -> list[str]:
    return [str(each.dirpath) for each in trainer.checkpoint_callbacks if getattr(each, "dirpath", None)]


def _check_addresses(trainer: Any) -> None:
    """Refuse addresses that checkpoints would not reach; equal on all ranks."""
    for dirpath in _dirpaths(trainer):
        if trainer.strategy.config.save_distributed_checkpoint:
            place = located(dirpath)
            if isinstance(place, str):
                Address(place)
        if any(name in Path(dirpath).parts for name in ("file:", "local:")):
            raise SequenceParallelError(
                f"ModelCheckpoint's dirpath {dirpath!r}: Lightning takes file:// for a folder below the working directory; give the "
                "path itself"
            )
