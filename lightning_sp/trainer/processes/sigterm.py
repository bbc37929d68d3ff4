"""SIGTERM, agreed on by the ranks: the run ends on all of them after the same optimizer step.

Lightning broadcasts rank 0's flag over the device before each batch, which the host waits for, and again in the signal's handler, in the middle
of whatever collective runs; and a rank that was told ends by itself while the others wait for it. Here a handler communicates nothing. A
rank's flag goes with what ranks say of each batch, and Lightning is told on all of them.

SLURM's signal before its time limit (SIGUSR1) is another name for the same: Lightning saves in its handler, between whatever collectives run.
"""

from __future__ import annotations

import logging
import signal
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer

from lightning_sp.trainer.processes.time_limit import Limit, TimeLimit

log = logging.getLogger(__name__)


class Sigterm:
    """Whether this rank was told to end; a class because a handler sets it.

    Attributes:
        is_told: this rank got the signal.
        is_agreed: any rank did, and all of them know.
        requeues: it was SLURM's, which wants its job to be queued again.
    """

    def __init__(self) -> None:
        self.is_told = self.is_agreed = self.requeues = False
        self._limit = TimeLimit()

    def follow(self, trainer: Trainer, limit: Limit) -> None:
        """Take the place of Lightning's handlers and of its collectives in a run."""
        self.is_told = self.is_agreed = self.requeues = False
        connector: Any = trainer._signal_connector
        # Lightning binds the handlers when it registers them, after this.
        connector._sigterm_notifier_fn = lambda signum, _: self._note(trainer, signum)
        connector._slurm_sigusr_handler_fn = lambda signum, _: self._note(trainer, signum)
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: None
        self._limit.start(limit, {signal.SIGTERM, _requeue_signal(trainer)})

    def stop(self) -> None:
        """End with the run."""
        self._limit.stop()

    def _note(self, trainer: Trainer, signum: int) -> None:
        log.info(f"[rank: {trainer.global_rank}] Received {signal.Signals(signum).name}: the run ends after this step")
        launcher = trainer.strategy.launcher
        if not self.is_told and launcher is not None:
            launcher.kill(signum)
        self.is_told = True
        self.requeues |= signum == _requeue_signal(trainer)
        self._limit.begin()

    def agree(self, trainer: Trainer, any_told: bool) -> None:
        """Let Lightning end the run after the batch in progress if any rank was told; the same on all ranks.

        Within a window of accumulation it goes on: what is saved is a whole step, and a sum of gradients is not saved.
        """
        if not any_told:
            return
        if not self.is_agreed:
            self.is_agreed = True
            self._limit.begin()
        if not trainer.training or _is_last_of_window(trainer):
            trainer._signal_connector.received_sigterm = True


def _requeue_signal(trainer: Trainer) -> int:
    """Return the signal that SLURM sends before its time limit, -1 where Lightning does not queue its jobs again."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
        return int(environment.requeue_signal)
    return -1


def _is_last_of_window(trainer: Trainer) -> bool:
    """Return whether an optimizer steps behind the batch that is about to begin."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    begun = progress.current.ready + 1
    is_full = begun % trainer.accumulate_grad_batches == 0
    return is_full or progress.is_last_batch or begun >= trainer.num_training_batches
