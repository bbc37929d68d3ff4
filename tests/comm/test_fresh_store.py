"""A run that is started again by torchrun's agent does not read what its earlier life has left in the store."""

from __future__ import annotations

import itertools
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_sp.comm.fresh_store import agreed_prefix, join, joined_store
from lightning_sp.errors import SequenceParallelError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def life(store: dist.Store, size: int) -> set[str]:
    with ThreadPoolExecutor(size) as ranks:
        told = [ranks.submit(agreed_prefix, store, rank, size, timedelta(seconds=20)) for rank in range(size)]
        return {each.result() for each in told}


def test_lives_in_one_store_have_prefixes_of_their_own():
    store = dist.HashStore()
    (first,), (second,), (fewer,), (alone,) = (life(store, size) for size in (3, 3, 2, 1))
    assert len({first, second, fewer, alone}) == 4


def test_a_rank_that_does_not_come_is_an_error_in_time():
    store = dist.HashStore()
    life(store, 2)
    with pytest.raises(dist.DistStoreError, match=r"of 2 ranks not all have come within 0\.2 s"):
        agreed_prefix(store, 0, 2, timedelta(seconds=0.2))


def joined(sizes: list[int], limit_s: float = 20.0) -> list[str]:
    """Let ranks join that were told these numbers of ranks, and return what is said to each."""
    store = dist.HashStore()

    def one(rank: int) -> str:
        try:
            join(store, rank, sizes[rank], timedelta(seconds=limit_s))
        except (SequenceParallelError, dist.DistError) as error:
            return str(error)
        return "joined"

    with ThreadPoolExecutor(len(sizes)) as ranks:
        return list(ranks.map(one, range(len(sizes))))


def test_ranks_that_were_told_other_numbers_of_ranks_are_told_both():
    assert joined([3, 3, 3]) == ["joined"] * 3
    for first, other in ((2, 3), (3, 2)):
        said = joined([first, other])
        assert said == [said[0]] * 2
        assert said[0].startswith(
            f"the number of ranks is {first} on rank 0; {other} on rank 1: each takes Trainer(dev"
        )


def test_the_ranks_that_have_not_come_are_named():
    assert joined([4, 4], 0.3)[0] == "of 4 ranks these have not come within 0.3 s: 2, 3"


def test_ranks_of_two_runs_do_not_meet_at_one_port(monkeypatch):
    """The first rank of the second run has failed to listen; its second one is there before the first run's own."""
    monkeypatch.setattr(sys.modules[join.__module__], "_worlds", itertools.repeat(0))  # each is a process of its own
    limit, at = timedelta(seconds=1.5), ("127.0.0.1", free_port())
    with ThreadPoolExecutor(3) as ranks:
        first = ranks.submit(joined_store, 0, 2, timedelta(seconds=20), at=at, run="one")
        other = ranks.submit(joined_store, 1, 2, limit, at=at, run="two")
        with pytest.raises(dist.DistError):
            other.result()
        assert not first.done()
        ranks.submit(joined_store, 1, 2, timedelta(seconds=20), at=at, run="one").result()
        assert first.result() is not None
