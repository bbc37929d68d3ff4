"""Ranks come together before what all of them call: one that is alone there waits, and is named (`hangs`).

    rank 0    next batch's message ..................... waits      "ranks wait in different collectives", on both
    rank 1    trainer.save_checkpoint, by itself: comes together, waits

Its messages would meet those that the others are at. Of other sizes they end a process in gloo's native code, without a word; of the same size
each would read the other's bytes. In the store a rank alone disturbs nobody.
"""

from __future__ import annotations

import itertools
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d

from lightning_sp.comm.groups import timeout_s
from lightning_sp.comm.meetings.failing_together import check_peers

_numbers = itertools.count()


def come_together() -> None:
    """Wait until all ranks of the world are here. Every rank must call it.

    Communicates: two or three entries in the store for each rank; not in a step, for the host waits.

    Raises:
        DistStoreError: some have not come within the time limit of a collective.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    check_peers(None, "a call of all ranks")
    store, number = _c10d._get_default_store(), next(_numbers)
    key = f"lightning_sp/together/{number}"
    if store.add(key, 1) == dist.get_world_size():
        store.set(f"{key}/all", "")
        for read in (f"lightning_sp/together/{number - 1}", f"lightning_sp/together/{number - 1}/all"):  # all are here
            store.delete_key(read)
    store.wait([f"{key}/all"], timedelta(seconds=timeout_s()))
