"""One world after another in the processes of a pool."""

import os
from datetime import timedelta

import torch.distributed as dist


def make_next_world(name, *, timeout_s=60):
    """Make the world of this pool's ranks again, after `destroy_process_group`; `name` is of this world alone.

    They meet in the store that the pool holds: a port that is only looked up may be another program's when rank 0 binds it.
    """
    rank, size, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size, timeout=timeout)
