"""A store for one life of a run: torchrun's agents keep theirs when they start the ranks again, with the addresses of ranks that have ended.

torch does not tell them apart: a rank that reads one early connects to nobody, and its life ends before it has begun. So ranks exchange numbers
that no life has had before.

    rank r    hello/r = its number                          until ack/<its number> is there: the prefix of all; then it says met/<prefix>/r
    rank 0    ack/<number> for each number of each hello    until all have met
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d
from torch.distributed.rendezvous import rendezvous

_ROOT, _LOOKS_EACH_S = "lightning_sp/life", 0.02


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
