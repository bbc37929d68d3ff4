"""Workers of a loader: they end with their rank, and what they cannot send is an error of their rank's.

an error whose class cannot be pickled, a batch with a lock     torch prints it in the worker, and the rank waits for ever
/dev/shm is full: through it workers send tensors               torch's words name neither the folder nor its size
"""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import queues
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, get_worker_info

from lightning_sp.errors import SequenceParallelError, text_of, told_error

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_FOLDER = "/dev/shm"
# What a semaphore and its neighbours need.
_LEAST = 1 << 16
# torch's, of a file of shared memory, and of a worker that has written to a page that there is not.
_FULL = re.compile(r"/torch_.*No space left|shared memory|Bus error")

_print = queues.Queue._on_queue_feeder_error  # type: ignore[attr-defined]


class WorkerBegin:
    """What a loader's worker begins with. A class, for a worker may be spawned.

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
        # A method, not Python's static one: it is given the queue, before that has its thread.
        queues.Queue._on_queue_feeder_error = _send_error  # type: ignore[attr-defined]
        if self._begin is not None:
            self._begin(worker)


def prepare_workers(loader: Any) -> None:
    """Let a loader's workers begin as `WorkerBegin`. Not before its first batch: Lightning adds its own where there is none yet."""
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, WorkerBegin):
        loader.worker_init_fn = WorkerBegin(loader.worker_init_fn)


@contextmanager
def named_workers() -> Iterator[None]:
    """Say which memory is full, and how to make it larger.

    Raises:
        SequenceParallelError: a worker has no room for its batch.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        is_of_worker = "worker" in text_of(error) and _FULL.search(text_of(error)) is not None
        if not is_of_worker and not _has_no_semaphore(error):
            raise
        raise SequenceParallelError(
            f"a worker of the loader has no room for its batch in {_FOLDER}, through which it sends tensors, and of which {_room()}: make it "
            "larger (docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory there), or give the loader fewer "
            f"num_workers or a smaller prefetch_factor ({told_error(error)})"
        ) from error


def _has_no_semaphore(error: BaseException) -> bool:
    """Return whether an error is that of a worker's queue, which Python makes before the worker: it names no file."""
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None
    return is_full and _bytes()[0] < _LEAST


def _bytes() -> tuple[int, int]:
    """Return what is free of the folder, and its size; 0 where there is none."""
    try:
        found = os.statvfs(_FOLDER)
    except OSError:
        return 0, 0
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def _room() -> str:
    free, whole = (number / 2**20 for number in _bytes())
    return f"{free:.1f} of {whole:.1f} MiB are free now"


def _send_error(queue: Any, error: Exception, item: Any) -> None:
    """Send what a worker's queue could not pickle as an error, in the place of the batch; runs in the queue's thread.

    Args:
        queue: of batches, to the rank.
        error: of pickling.
        item: what was to be sent: the batch's number, and the batch or what reading it has raised.
    """
    number, data = item if isinstance(item, tuple) and len(item) == 2 else (None, None)
    if not isinstance(number, int):
        _print(error, item)
        return
    info = get_worker_info()
    where = f"in DataLoader worker process {info.id if info is not None else 0}"
    if isinstance(data, ExceptionWrapper):
        # Of the class that the user's is made of, with its traceback; its own cannot be looked up in the rank.
        data.exc_type = next(each for each in data.exc_type.__mro__ if _can_be_sent(each))
        queue.put((number, data))
        return
    why = SequenceParallelError(
        f"a batch cannot be sent from its worker to the rank: {told_error(error)}; leave out of samples what cannot be pickled (locks, open "
        "files, functions of a function), or give num_workers=0"
    )
    told: Any = ExceptionWrapper  # without types
    queue.put((number, told((type(why), why, None), where)))


def _can_be_sent(kind: type) -> bool:
    try:
        pickle.dumps(kind)
    except Exception:  # whatever pickle, or the class' own rules for it, makes of a class that a function has made
        return False
    return issubclass(kind, Exception)
