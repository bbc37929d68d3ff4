"""A store for one life of one run, in which all ranks have met.

torchrun's agents keep theirs when they start the ranks again, with the addresses of ranks that have ended. torch does not tell them apart: a
rank that reads one early connects to nobody, and its life ends before it has begun. So ranks exchange numbers that no life has had before.

    rank r    hello/r = its number                          until ack/<its number> is there: the prefix of all; then it says met/<prefix>/r
    rank 0    ack/<number> for each number of each hello    until all have met

Elsewhere rank 0 holds the store. Two runs that were given one MASTER_PORT would meet in it, and ranks that were given other numbers of ranks
would wait for some that nobody starts. So what one script has started has keys of its own, and each rank compares its number with rank 0's.
"""

from __future__ import annotations

import itertools
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d
from torch._C._distributed_c10d import TCPStore
from torch.distributed.rendezvous import rendezvous

from lightning_sp.comm.loopback import listening_on_loopback
from lightning_sp.errors import SequenceParallelError

_ROOT, _LOOKS_EACH_S = "lightning_sp/life", 0.02
_SHOWN = 8
# All ranks of a run have been in as many worlds; a world may find the store of the one before.
_worlds = itertools.count()


def fresh_store(rank: int, size: int, timeout: timedelta) -> _c10d.Store | None:
    """Return a store without what earlier lives of this run have left; None where no agent of torchrun keeps one. Every rank must call it.

    Args:
        rank: of this process.
        size: number of ranks.
        timeout: until which all must have come.

    Raises:
        DistStoreError: some have not.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
    return _c10d.PrefixStore(f"{_ROOT}/{agreed_prefix(store, rank, size, timeout)}", store)


def joined_store(rank: int, size: int, timeout: timedelta, *, at: tuple[str, int], run: str) -> _c10d.Store:
    """Return a store that rank 0 holds, when all ranks have come. Every rank must call it.

    Args:
        rank: of this process.
        size: number of ranks, as this one was told.
        timeout: until which all must have come.
        at: where it is: an address of rank 0's host, and a port.
        run: what all ranks know, and none of another run; empty where there is no such thing.

    Raises:
        DistStoreError: some have not.
        SequenceParallelError: ranks were told other numbers of ranks.
    """
    listens = listening_on_loopback(*at) if rank == 0 else None
    root = TCPStore(*at, size, rank == 0, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=listens)
    store = _c10d.PrefixStore(f"{_ROOT}/{run or 'by_hand'}/{next(_worlds)}", root)
    join(store, rank, size, timeout)
    return store


def join(store: _c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Wait until all ranks are there, and compare how many each says they are. As `joined_store`."""
    if rank:
        store.wait(["size"], timeout)
        if (first := int(store.get("size"))) != size:
            store.set("other", f"{size} on rank {rank}")
            raise _other_sizes(f"{first} on rank 0; {size} on rank {rank}")
        store.set(f"here/{rank}", "")
        store.wait(["all"], timeout)
        return
    store.set("size", str(size))
    until, missing = time.monotonic() + timeout.total_seconds(), list(range(1, size))
    while missing := [each for each in missing if not store.check([f"here/{each}"])]:
        if store.check(["other"]):
            raise _other_sizes(f"{size} on rank 0; {store.get('other').decode()}")
        if time.monotonic() > until:
            shown = f"{', '.join(map(str, missing[:_SHOWN]))}{'' if len(missing) <= _SHOWN else ' and others'}"
            raise dist.DistStoreError(
                f"of {size} ranks these have not come within {timeout.total_seconds():g} s: {shown}"
            )
        time.sleep(_LOOKS_EACH_S)
    store.set("all", "")


def _other_sizes(numbers: str) -> SequenceParallelError:
    return SequenceParallelError(
        f"the number of ranks is {numbers}: each takes Trainer(devices=...) times num_nodes, and they would wait for ranks that nobody starts; "
        "give all the same, not what a rank finds on its host"
    )


def agreed_prefix(store: _c10d.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return rank 0's number, which every rank of this life has, and none of another."""
    own = uuid.uuid4().hex
    if rank:
        store.set(f"{_ROOT}/hello/{rank}", own)
        store.wait([f"{_ROOT}/ack/{own}"], timeout)
        prefix: str = store.get(f"{_ROOT}/ack/{own}").decode()
        store.set(f"{_ROOT}/met/{prefix}/{rank}", "")
        return prefix
    until, others = time.monotonic() + timeout.total_seconds(), range(1, size)
    while not all(store.check([f"{_ROOT}/met/{own}/{each}"]) for each in others):
        if time.monotonic() > until:
            raise dist.DistStoreError(f"of {size} ranks not all have come within {timeout.total_seconds():g} s")
        for each in others:
            if store.check([hello := f"{_ROOT}/hello/{each}"]):
                store.set(f"{_ROOT}/ack/{store.get(hello).decode()}", own)
        time.sleep(_LOOKS_EACH_S)
    return own
