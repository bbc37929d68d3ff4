"""Workers of a loader end with their rank, in whatever they hang."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.data.loaders.lazy_loader import LazyDataLoader
from lightning_sp.data.loaders.replace_sampler import replace_sampler
from lightning_sp.errors import SequenceParallelError


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


class Sized(Dataset[int]):
    """As many samples as it is told."""

    size = 12

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("training", [True, False])
def test_a_dataset_that_has_another_length_than_its_order_is_refused(training: bool) -> None:
    data = Sized()
    coordinates = DataCoordinates(dp_rank=0, dp_size=1, sequence_group=None, control_group=None)
    loader = replace_sampler(DataLoader(data, batch_size=2), coordinates, training=training, accumulation=1, seed=0)
    assert len(list(loader)) == 6
    data.size = 7
    with pytest.raises(SequenceParallelError, match=r"^the dataset Sized has 7 samples, and had 12 when the order"):
        next(iter(loader))
