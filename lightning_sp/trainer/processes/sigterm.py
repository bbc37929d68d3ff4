"""SIGTERM, agreed on by the ranks: the run ends on all of them after the same batch.

Lightning broadcasts rank 0's flag over the device before each batch, which the host waits for, and again in the signal's handler, in the middle
of whatever collective runs; and a rank that was told ends by itself while the others wait for it. Here a handler communicates nothing. A
rank's flag goes with what ranks say of each batch, and Lightning is told on all of them.
"""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import Trainer

log = logging.getLogger(__name__)


class Sigterm:
    """Whether this rank was told to end; a class because a handler sets it.

    Attributes:
        is_told: this rank got the signal.
    """

    def __init__(self) -> None:
        self.is_told = False

    def follow(self, trainer: Trainer) -> None:
        """Take the place of Lightning's handler and of its collectives in a run."""
        self.is_told = False
        connector: Any = trainer._signal_connector
        # Lightning binds the handler when it registers it, after this.
        connector._sigterm_notifier_fn = lambda signum, _: self._note(trainer, signum)
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: None

    def _note(self, trainer: Trainer, signum: int) -> None:
        log.info(f"[rank: {trainer.global_rank}] Received SIGTERM: {signum}")
        launcher = trainer.strategy.launcher
        if not self.is_told and launcher is not None:
            launcher.kill(signum)
        self.is_told = True

    def agree(self, trainer: Trainer, any_told: bool) -> None:
        """Let Lightning end the run after the batch in progress if any rank was told; the same on all ranks."""
        if any_told:
            trainer._signal_connector.received_sigterm = True
