"""A failure that some ranks have and others wait for: told through the store that the processes met in, for collectives may be stuck."""

from __future__ import annotations

import itertools
import time

import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d

from lightning_sp.errors import SequenceParallelError

# How long a rank that failed waits for the others' word: one that is stuck in a collective gives none before this rank ends.
_PATIENCE_S = 5.0
_numbers = itertools.count()
_OURS, _OTHER, _FINE = "1", "2", "0"


def tell_failure(error: str | None, *, named: bool) -> str | None:
    """Tell all ranks of a failure, or of none, and return what all of them are to raise: None for nothing. Every rank must call it.

    Args:
        error: this rank's, None if none.
        named: it is a refusal of ours, which says more than another rank's failure.

    Communicates: one entry in the store for each rank, on the host. A rank that failed waits for at most 5 s for the others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    said = _exchange(None if error is None else (_OURS if named else _OTHER) + error)
    failures = sorted(each for each in said if each is not None and each[0] != _FINE)
    if not failures:
        return None
    return failures[0][1:]


def failures_of_all(error: str | None) -> list[str]:
    """Tell all ranks of a failure that the run may outlive, or of none, and return those of all ranks. Every rank must call it.

    Args:
        error: this rank's, None if none.

    Communicates: as `tell_failure`.

    Raises:
        SequenceParallelError: this rank failed, and others have not ended what they do: they wait for it in a collective.
    """
    said = _exchange(None if error is None else _OTHER + error)
    if error is not None and None in said:
        silent = [rank for rank, each in enumerate(said) if each is None]
        raise SequenceParallelError(
            f"{error} (on this rank; ranks {silent} wait for it in a collective, and cannot go on)"
        )
    return [each[1:] for each in said if each is not None and each[0] != _FINE]


def is_of_communication(error: Exception) -> bool:
    """Return whether an error is that of a message between ranks: too late, or of a rank that has ended."""
    # gloo raises a plain RuntimeError, with the place in its sources.
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in ("gloo/", "pair closure"))


def _exchange(failure: str | None) -> list[str | None]:
    """Return what each rank says, None where one that failed has waited in vain for a rank's word; nothing without other ranks."""
    number = next(_numbers)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [] if failure is None else [failure]
    store, world = _c10d._get_default_store(), dist.get_world_size()
    keys = [f"lightning_sp/failure/{number}/{rank}" for rank in range(world)]
    store.set(keys[dist.get_rank()], _FINE if failure is None else failure)
    if failure is None:
        store.wait(keys)
    else:
        until = time.monotonic() + _PATIENCE_S
        while not store.check(keys) and time.monotonic() < until:
            time.sleep(0.01)
    return [store.get(key).decode() if store.check([key]) else None for key in keys]
