"""What is made of the batch of a step that runs, as far as it is followed. Owns which steps run; what follows them is `read_numbers.py`."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager

from torch import Tensor

_running: list[Container[Tensor]] = []


@contextmanager
def following(made: Container[Tensor]) -> Iterator[None]:
    """Follow a step's batch within; `made` holds what is made of it."""
    _running.append(made)
    try:
        yield
    finally:
        _running.remove(made)


def follows_batches() -> bool:
    """Return whether a step runs of which it is followed what is made of its batch."""
    return bool(_running)


def is_of_batch(tensor: Tensor) -> bool:
    """Return whether a tensor is made of the batch of a step that runs."""
    return any(tensor in each for each in _running)
