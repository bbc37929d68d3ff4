"""A run that is told to end saves before it does: where it is found again, and with which code its process ends.

    SIGTERM (Kubernetes, a spot instance, SLURM, `kill`)   last-preempted.ckpt beside ModelCheckpoint's; `ckpt_path="last"` finds it,
                                                           and it goes when a later one that is found so is complete
    SIGUSR1 in a SLURM job (its time limit is near)        Lightning's hpc_ckpt_<n>.ckpt, with which SLURM's next run begins by itself

All ranks have agreed on it, so all of them are here after the same step. `processes/sigterm.py` owns that, and the time limit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_sp.errors import SequenceParallelError
from lightning_sp.trainer.processes.sigterm import Sigterm

PREEMPTED = "preempted"


def save_when_preempted(trainer: Trainer, sigterm: Sigterm) -> None:
    """Let a fit that was told to end save before it goes. For one run: the next Trainer's fit is told anew."""
    loop: Any = trainer.fit_loop
    loop.run = partial(_run, trainer, sigterm, partial(type(loop).run, loop))


def set_exit_code(error: BaseException, code: int, *, is_script_child: bool) -> None:
    """Let a process that was told to end do so with a code: of Lightning's exception it is 0, as if the run were over.

    Args:
        error: what ends the run.
        code: of the process.
        is_script_child: a rank that rank 0's script has started: Lightning kills rank 0 when one ends with another code than 0.
    """
    if isinstance(error, SIGTERMException):
        error.code = 0 if is_script_child else code


def _run(trainer: Trainer, sigterm: Sigterm, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except SIGTERMException:
        if sigterm.is_agreed:
            _save(trainer, requeues=bool(trainer.strategy.broadcast(sigterm.requeues)))
        raise


def _save(trainer: Trainer, *, requeues: bool) -> None:
    """Save; a run that cannot says so, and ends as told all the same: it goes on from the checkpoint before."""
    _begin_validation_again(trainer)
    try:
        if requeues:
            _save_and_requeue(trainer)
        elif (path := preempted_path(trainer)) is None:
            rank_zero_warn(
                f"the run was told to end at step {trainer.global_step} and nothing is saved: it has no ModelCheckpoint, or fast_dev_run; "
                "enable_checkpointing=True saves it"
            )
        else:
            trainer.save_checkpoint(path)
            rank_zero_info(
                f"sequence_parallel: the run was told to end, and is saved at step {trainer.global_step} in {path}; go on by ckpt_path='last'"
            )
    except SequenceParallelError as error:  # on all ranks
        if trainer.is_global_zero:
            sys.stderr.write(f"sequence_parallel: told to end at step {trainer.global_step}, not saved: {error}\n")
            sys.stderr.flush()


def preempted_path(trainer: Any) -> str | None:
    """Return where a run that is told to end is saved, None where it has no place for checkpoints."""
    callback = next((each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)), None)
    if callback is None or callback.dirpath is None or trainer.fast_dev_run:
        return None
    name = f"{callback.CHECKPOINT_NAME_LAST}-{PREEMPTED}{callback.FILE_EXTENSION}"
    return os.path.join(callback.dirpath, name)


def superseded(trainer: Any, path: Path | str, checkpoint: Mapping[str, Any]) -> str | None:
    """Return the checkpoint that a run was told to end with, once another stands for it; None where it is to stay.

    That is for the run that went on from it, when a later checkpoint is written which `ckpt_path="last"` finds, too, and a fit can go on from:
    with `ModelCheckpoint(save_last=True)` alone. Of a run without one the next such end replaces it.

    Args:
        trainer: of a fit.
        path: of the later checkpoint.
        checkpoint: what that holds.
    """
    preempted = preempted_path(trainer)
    if preempted is None or trainer.ckpt_path is None or not checkpoint.get("optimizer_states"):
        return None
    began, written = (os.path.abspath(os.fspath(each)) for each in (trainer.ckpt_path, path))
    here = os.path.abspath(preempted)
    is_last = os.path.basename(written).startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST)
    return (
        preempted
        if is_last and began == here != written and os.path.dirname(written) == os.path.dirname(here)
        else None
    )


def _save_and_requeue(trainer: Trainer) -> None:
    """Do what Lightning does in the signal's handler: save, and let rank 0 ask SLURM to queue the job again."""
    connector: Any = trainer._signal_connector
    type(connector)._slurm_sigusr_handler_fn(connector, 0, None)


def _begin_validation_again(trainer: Trainer) -> None:
    """Let a validation that was cut short begin anew in the run that goes on: Lightning would leave it out."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    if not trainer.validating:
        return
    progress = loop.batch_progress
    for tracker, before in (
        (progress.current, 0),
        (progress.total, progress.total.ready - progress.current.ready),
    ):
        # As within its first batch: of what Lightning would take for a restart in the middle, the middle is the begin.
        tracker.ready = tracker.started = before + 1
        tracker.processed = tracker.completed = before
