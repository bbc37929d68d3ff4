"""A run that is started again by torchrun's agent does not read what its earlier life has left in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_sp.comm.fresh_store import agreed_prefix


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
