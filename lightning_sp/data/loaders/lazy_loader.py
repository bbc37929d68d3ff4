"""A DataLoader that starts at its first batch, so that a resume can still set its sampler; its workers end with their rank."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError

# linux/prctl.h
_PR_SET_PDEATHSIG = 1


class LazyDataLoader(DataLoader[Any]):
    """A loader that starts at its first batch, not when the iterator is made.

    Lightning makes the iterator before it restores a checkpoint when `configure_optimizers` reads
    `trainer.estimated_stepping_batches`; workers would have fetched the epoch's first samples by then.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches that are left in the epoch.

        Raises:
            SequenceParallelError: the dataset has another number of samples than when its order was made.
        """
        self._check_length()
        if self.num_workers and not isinstance(self.worker_init_fn, EndWithRank):
            # Not before: Lightning adds its own where there is none yet.
            self.worker_init_fn = EndWithRank(self.worker_init_fn)
        yield from super().__iter__()

    def _check_length(self) -> None:
        inner = getattr(self.batch_sampler, "sampler", None)
        known = getattr(self.batch_sampler if inner is None else inner, "num_samples", None)
        if known is not None and known != (now := len(self.dataset)):  # type: ignore[arg-type]
            name = type(getattr(self.dataset, "stood_for", self.dataset)).__name__
            raise SequenceParallelError(
                f"the dataset {name} has {now} samples, and had {known} when the order of an epoch was "
                "made of that number; Trainer(reload_dataloaders_every_n_epochs=1) makes it anew, or keep the number for a run"
            )

    def state_dict(self) -> dict[str, Any]:
        """Say that the cursor is stored elsewhere. That there is a state tells Lightning that a resume in an epoch is exact."""
        return {"position_kept_by": "lightning_sp"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the resume has set the sampler."""


class EndWithRank:
    """What a loader's worker begins with: it ends when its rank has ended, by whatever signal. A class, for a worker may be spawned.

    torch's workers look for their rank between two samples: one that hangs in a user's `__getitem__` would stay, with its memory. Linux alone.

    Args:
        begin: the user's `worker_init_fn`.
    """

    def __init__(self, begin: Callable[[int], None] | None) -> None:
        self._begin, self._rank = begin, os.getpid()

    def __call__(self, worker: int) -> None:
        """Ask the kernel for SIGKILL at the rank's end. Source: prctl(2), PR_SET_PDEATHSIG."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if not os.path.exists(f"/proc/{self._rank}"):  # it has ended before
                os._exit(1)
        if self._begin is not None:
            self._begin(worker)
