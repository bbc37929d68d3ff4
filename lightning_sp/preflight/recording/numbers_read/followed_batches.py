"""The batches of steps that run, as far as it is followed what is made of them. Owns which steps run; what follows them is `read_numbers.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor


class _Follows(Protocol):
    def hand(self, batch: Any) -> None: ...

    def follows(self, tensor: Tensor) -> bool: ...


_running: list[_Follows] = []
_begun = [0]


@contextmanager
def following(step: _Follows) -> Iterator[None]:
    """Have a step's batches followed within."""
    _running.append(step)
    try:
        yield
    finally:
        _running.remove(step)


def follow(batch: Any) -> None:
    """Follow a batch from here on, which hooks of the user's have before the step."""
    _begun[0] += 1
    for each in _running:
        each.hand(((batch,), {}))


def runs_begun() -> int:
    """Return how many runs of steps have begun so far: another number is another run's."""
    return _begun[0]


def follows_batches() -> bool:
    """Return whether a step runs whose batch is followed."""
    return bool(_running)


def is_of_batch(tensor: Tensor) -> bool:
    """Return whether a tensor is made of the batch of a step that runs."""
    return any(each.follows(tensor) for each in _running)
