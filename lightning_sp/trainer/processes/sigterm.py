"""SIGTERM, agreed on by the ranks: the run ends on all of them after the same optimizer step.

Lightning broadcasts rank 0's flag over the device before each batch, which the host waits for, and again in the signal's handler, in the middle
of whatever collective runs; and a rank that was told ends by itself while the others wait for it. Here a handler communicates nothing. A
rank's flag goes with what ranks say of each batch, and Lightning is told on all of them.

SLURM's signal before its time limit (SIGUSR1) is another name for the same: Lightning saves in its handler, between whatever collectives run.

    setup, a checkpoint is read     the process ends at once, with the code of such ends: there is nothing to save
    from the first batch on         the run ends after the step in progress, saved
    behind the last batch           the fit ends as it should; the next run of the script ends with its first batch, and the script in time
"""

from __future__ import annotations

import logging
import signal
import threading
from dataclasses import replace
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer

from lightning_sp.trainer.processes.time_limit import Limit, TimeLimit

log = logging.getLogger(__name__)
# Of this process: the time that goes on behind a run that was told to end, and had.
_unheard: list[TimeLimit] = []


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
        self._waits = False

    def begin(self, limit: Limit, launcher: Any, *, is_script_child: bool) -> None:
        """Let SIGTERM end this process at once until Lightning has its handlers, which is behind the setup, with the code of such ends.

        Python has no handler there: it would end with another code, and as the first process of a container not at all.

        Args:
            limit: of the run.
            launcher: told, where it has started other ranks.
            is_script_child: as in `preemption.set_exit_code`.
        """
        self._end_waiting()
        if not _is_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def last() -> None:
            if launcher is not None:
                launcher.kill(signal.SIGTERM)

        signal.signal(signal.SIGTERM, _end_soon)
        self._waits = True
        code = 0 if is_script_child else limit.code
        self._limit.start(replace(limit, within_s=0.0, code=code, last=last), {signal.SIGTERM})

    def _end_waiting(self) -> None:
        if self._waits:
            self._waits = False
            self._limit.stop()
            if signal.getsignal(signal.SIGTERM) is _end_soon:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def follow(self, trainer: Trainer, limit: Limit) -> None:
        """Take the place of Lightning's handlers and of its collectives in a run."""
        self.is_told = self.is_agreed = self.requeues = False
        connector: Any = trainer._signal_connector

        def register_signal_handlers() -> None:
            self._end_waiting()
            if _unheard:  # told behind the last batch of another run of this process
                self.is_told, self._limit = True, _unheard.pop()
            else:
                self._limit.start(limit, {signal.SIGTERM, _requeue_signal(trainer)})
            type(connector).register_signal_handlers(connector)

        connector.register_signal_handlers = register_signal_handlers
        # Lightning binds the handlers when it registers them, after this.
        connector._sigterm_notifier_fn = lambda signum, _: self._note(trainer, signum)
        connector._slurm_sigusr_handler_fn = lambda signum, _: self._note(trainer, signum)
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: None

    def stop(self) -> None:
        """End with the run. Where it was told, and has ended by itself, the time of the process goes on."""
        self._end_waiting()
        if self.is_told and not self.is_agreed:
            self._limit.deafen()
            _unheard.append(self._limit)
            self._limit = TimeLimit()
        self._limit.stop()
        self.is_told = False

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


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _end_soon(signum: int, frame: Any) -> None:
    """Do nothing: a thread hears of the signal, and ends this process, whatever it waits for."""


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
