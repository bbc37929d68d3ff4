"""A failure that some ranks have and others wait for: told through the store that the processes met in, for collectives may be stuck."""

from __future__ import annotations

import itertools
import time
from threading import Thread

import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d

from lightning_sp.comm.connections import is_of_communication
from lightning_sp.comm.groups import timeout_s
from lightning_sp.comm.meetings.failing_together import PeerError
from lightning_sp.errors import SequenceParallelError, text_of, told_error

# How long a rank that failed waits for the others' word: one that is stuck in a collective gives none before this rank ends.
_PATIENCE_S = 5.0
_numbers = itertools.count()
# In the order in which they are told.
_OURS, _OTHER, _LOST, _FINE = "1", "2", "3", "0"


def tell_failure(error: Exception | None) -> str | None:
    """Tell all ranks of a failure, or of none, and return what all of them are to raise: None for nothing. Every rank must call it.

    Args:
        error: this rank's, None if none. A refusal of ours is told before another rank's failure, and last that another rank has failed.

    Communicates: one entry in the store for each rank, on the host. A rank that failed waits for at most 5 s for the others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    said = _exchange(None if error is None else _told(error))
    failures = sorted(each for each in said if each is not None and each[0] != _FINE)
    if not failures:
        return None
    return failures[0][1:]


def _told(error: Exception) -> str:
    if isinstance(error, SequenceParallelError):
        return _OURS + text_of(error)
    return (_LOST if isinstance(error, PeerError) or is_of_communication(error) else _OTHER) + told_error(error)


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


def all_go_on(*, lost: bool) -> bool:
    """Return whether every rank has failed by itself, so that their next messages belong together. Every rank must call it, after a failure.

    Args:
        lost: this rank failed in a message that another had left.

    Communicates: as `tell_failure`; a rank that waits for others in vain says no.
    """
    said = _exchange(_OTHER if lost else _OURS)
    return all(each is not None and each[0] == _OURS for each in said)


def _exchange(failure: str | None) -> list[str | None]:
    """Return what each rank says, None where one that failed has waited in vain for a rank's word; nothing without other ranks."""
    number = next(_numbers)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [] if failure is None else [failure]
    store, world = _c10d._get_default_store(), dist.get_world_size()
    keys = [f"lightning_sp/failure/{number}/{rank}" for rank in range(world)]
    found: list[str | None] = [None] * world
    errors: list[Exception] = []

    def exchange() -> None:
        try:
            store.set(keys[dist.get_rank()], _FINE if failure is None else failure)
            if failure is None:
                store.wait(keys)
            else:
                until = time.monotonic() + _PATIENCE_S
                while not store.check(keys) and time.monotonic() < until:
                    time.sleep(0.01)
            found[:] = [store.get(key).decode() if store.check([key]) else None for key in keys]
        except Exception as error:
            errors.append(error)

    # In a thread: where the store's host is out of reach, its answer would be waited for without any limit.
    asking = Thread(target=exchange, daemon=True)
    asking.start()
    asking.join(_PATIENCE_S + 1 if failure is not None else timeout_s())
    if failure is None and (errors or asking.is_alive()):
        raise errors[0] if errors else dist.DistStoreError(f"no answer from the store within {timeout_s():g} s")
    found[dist.get_rank()] = _FINE if failure is None else failure
    return list(found)
