"""Workers of a loader end with their rank, in whatever they hang, and what they cannot send is an error."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_sp.data.loaders import workers
from lightning_sp.data.loaders.broadcast_loader import BroadcastLoader
from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.data.loaders.lazy_loader import LazyDataLoader
from lightning_sp.errors import SequenceParallelError


@pytest.fixture(autouse=True)
def _shut_down():
    """End the workers of loaders that an error has left: torch, where garbage is collected, waits 5 s for each of them in vain."""
    yield
    for each in gc.get_objects():
        if type(each) is _MultiProcessingDataLoaderIter:
            each._shutdown_workers()


class Hangs(Dataset[int]):
    """The first sample says who reads it; the second never comes."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index:
            time.sleep(600)
        return os.getpid()


def rank(pipe: Any) -> None:
    """Read a sample, tell which process gave it, and wait for the next."""
    for batch in LazyDataLoader(Hangs(), batch_size=1, num_workers=1, worker_init_fn=told):
        pipe.send(int(batch))


def told(worker: int) -> None:
    """Begin as a user's worker does."""
    os.environ["TOLD_WORKER"] = str(worker)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent has ended")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_worker_that_hangs_ends_with_its_rank():
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=rank, args=(there,))
    process.start()
    assert here.poll(60)
    worker = here.recv()
    assert is_running(worker)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    until = time.time() + 10
    while is_running(worker) and time.time() < until:
        time.sleep(0.05)
    left = is_running(worker)
    if left:
        os.kill(worker, signal.SIGKILL)
    assert not left


def test_the_users_own_begin_is_kept():
    loader = LazyDataLoader(Begun(), batch_size=1, num_workers=1, worker_init_fn=told)
    assert [int(each) for _ in range(2) for each in loader] == [0, 0]


class Begun(Dataset[int]):
    """Says which worker the user's `worker_init_fn` was told."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return int(os.environ["TOLD_WORKER"])


def own_error() -> type[Exception]:
    class OwnError(LookupError):
        def __init__(self, what: str, where: str) -> None:
            super().__init__(what, where)

    return OwnError


class Unsendable(Dataset[Any]):
    """Its second sample cannot be sent: it has a lock, or its error is of a class that no other process finds."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        if index and self.what == "error":
            raise own_error()("shard 7", "bucket")
        if index and self.what == "no room":
            raise RuntimeError("unable to write to file </torch_12_3>: No space left on device (28)")
        return {"lock": threading.Lock()} if index else {}


def first(rows: list[Any]) -> Any:
    return rows[0]


def loaders(what: str) -> list[Any]:
    """Return the loader whose order is ours, and a user's own that one rank reads for all."""
    given: dict[str, Any] = dict(batch_size=1, num_workers=1, collate_fn=first, timeout=20)
    alone = DataCoordinates(dp_rank=0, dp_size=1, sequence_group=None, control_group=None)
    return [
        LazyDataLoader(Unsendable(what), **given),
        BroadcastLoader(DataLoader(Unsendable(what), **given), alone),
    ]


@pytest.mark.parametrize("number", [0, 1], ids=["own order", "read by one"])
def test_an_error_whose_class_cannot_be_pickled_comes_at_once(number):
    own = [
        r"Caught LookupError in DataLoader worker process 0\.(?s:.*)in __getitem__(?s:.*)OwnError: \('shard 7', 'bucket'\)",
    ]
    began = time.monotonic()
    with pytest.raises(LookupError if not number else SequenceParallelError, match=own[0]):
        list(loaders("error")[number])
    assert time.monotonic() - began < 20


def test_a_batch_that_cannot_be_pickled_is_named():
    with pytest.raises(
        SequenceParallelError,
        match=r"a batch cannot be sent .* TypeError: cannot pickle '_thread.lock' object; leave out",
    ):
        list(loaders("lock")[0])


@pytest.mark.parametrize("number", [0, 1], ids=["own order", "read by one"])
def test_a_full_folder_of_shared_memory_is_named(number):
    said = r"a worker of the loader has no room for its batch in /dev/shm, .* MiB are free now: make it larger \(docker run --shm-size"
    with pytest.raises(SequenceParallelError, match=said):
        list(loaders("no room")[number])


@pytest.mark.parametrize(("free", "kind"), [(0, SequenceParallelError), (1 << 20, OSError)])
def test_a_semaphore_without_room_is_named_and_another_full_disk_is_not(monkeypatch, free, kind):
    """Python makes a queue's semaphores in that folder, and its error names nothing."""
    monkeypatch.setattr(workers, "_bytes", lambda: (free, 1 << 26))
    with (
        pytest.raises(kind, match=f"{free / 2**20:.1f} of 64.0 MiB are free now" if not free else "No space left"),
        workers.named_workers(),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_error_of_the_users_own_stays():
    with pytest.raises(RuntimeError, match=r"^no worker was killed"), workers.named_workers():
        raise RuntimeError("no worker was killed")
