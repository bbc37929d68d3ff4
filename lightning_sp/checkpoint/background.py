"""Checkpoints that are written while training goes on: one at a time, each whole or not there, and no error of one is lost.

Ranks tell each other through the store that they have written (`comm.SideGather`), so no collective runs beside a step's. What a newer
checkpoint makes superfluous is deleted when that is complete.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from lightning_sp import comm
from lightning_sp.checkpoint.folders.folder import first_failure, remove_incomplete
from lightning_sp.checkpoint.staged_folder import StagedFolder, WrittenPart
from lightning_sp.errors import SequenceParallelError, told_error

# Where a run ends by an error: for the own part, and for those of others after it.
_WRITES_S, _OTHERS_S = 300.0, 60.0
# Where another rank is gone: if it could, it has written before it went. A launcher kills this rank soon, and the error is to be said first.
_LOST_WRITES_S, _LOST_OTHERS_S = 3.0, 1.5
# Why one is not complete that no rank has said a word of.
_LATE = "it takes too long"


class _Pending:
    """A checkpoint on its way: its thread, and what became of it."""

    def __init__(self, folder: StagedFolder, before: _Pending | None) -> None:
        self.folder, self._before = folder, before
        self.words: str | None = None
        self.not_done: list[str] = []  # behind it: errors of what was to be done
        self.path = folder.path
        self._gather, self._lock, self.has_written = comm.SideGather(), threading.Lock(), threading.Event()
        self._after: list[Callable[[], None]] = []
        initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device() if initialized else None
        # An interpreter that ends waits for no daemon; whoever ends a run waits for this.
        name = f"lightning_sp checkpoint {self.path.name}"
        self.thread = threading.Thread(target=self._run, args=(device,), name=name, daemon=True)
        self.thread.start()

    def then(self, act: Callable[[], None]) -> None:
        """Act when the checkpoint is complete; not at all if it never is."""
        with self._lock:
            if self.words is None:
                self._after.append(act)
                return
        if not self.words:
            act()

    def _run(self, device: int | None) -> None:
        if device is not None:
            # A new thread is on the first device, where every rank's would take memory.
            torch.cuda.set_device(device)
        if self._before is not None:
            self._before.thread.join()
            self._before = None
        part = self._written()
        self.has_written.set()
        words = self._gather.run(part, self._completed)
        del self.folder
        with self._lock:
            self.words, after = words, self._after
        if not words:
            for act in after:
                try:
                    act()
                except Exception as error:
                    self.not_done.append(told_error(error))

    def _written(self) -> WrittenPart | str:
        try:
            return self.folder.write_part()
        except (Exception, CheckpointException) as error:
            return first_failure(error)

    def _completed(self, parts: Sequence[WrittenPart | str]) -> str:
        failed = [f"rank {rank}: {part}" for rank, part in enumerate(parts) if isinstance(part, str)]
        try:
            if not failed:
                self.folder.complete([each for each in parts if isinstance(each, WrittenPart)])
                return ""
        except Exception as error:
            failed = [str(error) if isinstance(error, SequenceParallelError) else told_error(error)]
        remove_incomplete(self.path)
        return failed[0]


class BackgroundSaves:
    """A run's checkpoints on their way; a class because a save begins one, and the next waits for it."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._step = -1

    def begin(self, folder: StagedFolder, step: int) -> None:
        """Begin to write a copy; one of the same step is written after those before it."""
        self._step = step
        self._pending.append(_Pending(folder, self._pending[-1] if self._pending else None))

    def may_follow(self, path: Path, step: int) -> bool:
        """Return whether a checkpoint may be copied while others are on their way: of the same step, under another name."""
        return not self._pending or (step == self._step and all(each.path != path for each in self._pending))

    def act_after(self, act: Callable[[], None]) -> bool:
        """Act, remove an older checkpoint say, when the one on its way is complete; return False where none is."""
        if not self._pending:
            return False
        self._pending[-1].then(act)
        return True

    def wait(self, group: ProcessGroup | None) -> None:
        """Wait for all of them. Every rank must call it, as the saves themselves.

        Communicates: agreement on the errors, if any was on its way.

        Raises:
            SequenceParallelError: one could not be written.
        """
        pending, self._pending = self._pending, []
        for each in pending:
            each.thread.join()
        if words := _not_done(pending):
            rank_zero_warn(words)
        if pending:
            comm.agree(_failures(pending), group)

    def settle(self, *, is_lost: bool) -> None:
        """Wait for what is on its way where a run ends by an error, on this rank alone: nothing is raised, and what failed is said.

        Args:
            is_lost: the error is that another rank is gone.
        """
        pending, self._pending = self._pending, []
        writes_s, others_s = (_LOST_WRITES_S, _LOST_OTHERS_S) if is_lost else (_WRITES_S, _OTHERS_S)
        for each in pending:
            each.has_written.wait(writes_s)
            each.thread.join(others_s)
        late = "another rank, which has a part of it, is gone" if is_lost else _LATE
        for words in (_not_done(pending), _failures(pending, late)):
            if words:
                sys.stderr.write(f"sequence_parallel: {words}\n")
                sys.stderr.flush()


def _not_done(pending: Sequence[_Pending]) -> str | None:
    found = [
        f"behind checkpoint {each.path}, which is complete, an older one was not removed, or another thing not done: {error}"
        for each in pending
        for error in each.not_done
    ]
    return "; ".join(found) or None


def _failures(pending: Sequence[_Pending], late: str = _LATE) -> str | None:
    found = [
        f"checkpoint {each.path}, written while training went on, could not be written: "
        f"{late if each.words is None else each.words}; the one before stays"
        for each in pending
        if each.words != ""
    ]
    return "; ".join(found) or None
