"""Which of a run's checkpoints are written while training goes on, and when the run waits for them.

Those that a fit writes below the folder of Lightning's ModelCheckpoint, by whoever asks. What a user saves elsewhere is there when the call
returns; so is what a class derived from ModelCheckpoint saves, which may read it, and all where a hook of the user's does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.checkpoint import BackgroundSaves, available_bytes, staged_bytes
from lightning_sp.config import StrategyConfig
from lightning_sp.trainer.log_once import LogOnce

GIB = 2**30
# Of the memory that the host has left, what copies may take: a step needs some, too.
_SHARE = 0.5


class AsynchronousCheckpoints:
    """One run's checkpoints beside its steps; a class because a save begins one, and a later hook waits for it.

    Args:
        config: the strategy's options.
        log: where it says what it does.
    """

    def __init__(self, config: StrategyConfig, log: LogOnce) -> None:
        self._config, self._log = config, log
        self._saves = BackgroundSaves()
        self._reader = ""

    def follow(self, trainer: Trainer, group: Callable[[], ProcessGroup | None], *, reader: str) -> None:
        """Have a fit's checkpoints complete before its last hooks. Every rank must call it.

        Args:
            trainer: of the run.
            group: gives the world, on a backend for host objects.
            reader: code of the user's on this rank that reads during a fit where they are; none if empty.

        Communicates: the readers, once.
        """
        if trainer.state.fn == TrainerFn.FITTING and self._config.asynchronous_checkpoints:
            self._reader = next(filter(None, comm.gather_objects(reader, group())), "")
        loop: Any = trainer.fit_loop
        loop.on_run_end = partial(self._end, partial(type(loop).on_run_end, loop), group)

    def _end(self, on_run_end: Callable[[], None], group: Callable[[], ProcessGroup | None]) -> None:
        self._saves.wait(group())
        on_run_end()

    def next_save(
        self,
        checkpoint: dict[str, Any],
        path: Path | str,
        trainer: Trainer,
        *,
        ranks_per_node: int,
        group: ProcessGroup | None,
    ) -> Callable[[Any], None] | None:
        """Wait for checkpoints before this one, and return what takes a copy of it; None where it is to be written now.

        Every rank must call it. Communicates: agreement on errors of those before, and on the memory.

        Raises:
            SequenceParallelError: one of those before could not be written.
        """
        later = isinstance(path, Path) and self._is_asked(path, trainer)
        if isinstance(path, str) and self._config.asynchronous_checkpoints:
            self._log("checkpoints at addresses are written before training goes on", topic="later")
        if not isinstance(path, Path) or not later or not self._saves.may_follow(path, trainer.global_step):
            self._saves.wait(group)
        if not later or not (
            self._config.asynchronous_checkpoints is True or self._fits(checkpoint, ranks_per_node, group)
        ):
            self._saves.wait(group)
            return None
        return partial(self._saves.begin, step=trainer.global_step)

    def _is_asked(self, path: Path, trainer: Trainer) -> bool:
        if not self._config.asynchronous_checkpoints or not self._config.save_distributed_checkpoint:
            return False
        running = trainer.state.fn == TrainerFn.FITTING and trainer.state.stage is not None
        if not running or trainer.received_sigterm:
            return False
        given: list[Any] = trainer.checkpoint_callbacks
        callbacks = [each for each in given if getattr(each, "dirpath", None) and Path(each.dirpath) in path.parents]
        if any(getattr(each, "save_last", None) == "link" for each in callbacks):
            self._log(
                "checkpoints are written before training goes on, for save_last='link' links to what is there",
                topic="later",
            )
            return False
        if callbacks and self._reader:
            self._log(
                f"checkpoints are written before training goes on, for {self._reader}, and what is there is to be complete",
                topic="later",
            )
            return False
        return bool(callbacks) and all(type(each) is ModelCheckpoint for each in callbacks)

    def _fits(self, checkpoint: dict[str, Any], ranks_per_node: int, group: ProcessGroup | None) -> bool:
        """Return whether every node has memory for its ranks' copies; the same on all ranks."""
        needed, available = staged_bytes(checkpoint) * ranks_per_node, available_bytes()
        told = comm.gather_objects((needed, available), group)
        short = [(copies, left) for copies, left in told if left is None or copies > left * _SHARE]
        copies, left = (short or told)[0]
        memory = f"the copies of a node's {ranks_per_node} ranks need {copies / GIB:.2f} GiB, and {(left or 0) / GIB:.2f} GiB are available"
        if short:
            self._log(
                f"checkpoints are written before training goes on: {memory}, of which copies take half at most",
                topic="later",
            )
        else:
            self._log(f"checkpoints are written while training goes on: {memory}", topic="later")
        return not short

    def act_after(self, act: Callable[[], None]) -> bool:
        """Act when the checkpoint on its way is complete; return False where none is."""
        return self._saves.act_after(act)

    def wait(self, group: ProcessGroup | None) -> None:
        """Wait for all of them, on all ranks."""
        self._saves.wait(group)

    def settle(self, error: BaseException | None = None) -> None:
        """Wait for them on this rank, whose run ends by an error, if by any."""
        causes = [each for each in (error, getattr(error, "__cause__", None)) if each is not None]
        self._saves.settle(is_lost=any(comm.is_of_communication(each) for each in causes))
