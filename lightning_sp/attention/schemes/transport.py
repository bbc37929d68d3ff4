"""What a pass round the ring asks of whatever carries it: messages (`network_hops`) or memory that is shared (`shared_hops`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from lightning_sp.attention.plan.intervals import Range


class RingNeighbours(Protocol):
    """Who needs what of whom in a hop, as `ring.Ring` knows it."""

    @property
    def size(self) -> int:
        """Return the ranks of the ring."""
        ...

    def source(self, hop: int) -> int:
        """Return the rank whose keys arrive in a hop."""
        ...

    def target(self, hop: int) -> int:
        """Return the rank to which this rank's keys go in a hop."""
        ...

    def needed(self, hop: int) -> list[Range]:
        """Return the ranges of the source's keys that this rank needs in a hop."""
        ...

    def leaving(self, hop: int) -> list[Range]:
        """Return the ranges of this rank's keys that the target needs in a hop."""
        ...


class Arriving(Protocol):
    """Tokens on their way to this rank."""

    def wait(self) -> Tensor:
        """Return them, complete."""
        ...

    def release(self) -> None:
        """Say that they were used."""
        ...


class Transport(Protocol):
    """One pass round the ring, in flight."""

    def start_keys(self, hop: int) -> Arriving:
        """Start the hop that brings what this rank needs of the source's keys: (n, 2, B, K, D)."""
        ...

    def send_home(self, hop: int, gradients: tuple[Tensor, Tensor] | None) -> Arriving:
        """Start sending a partial (dk, dv) to the keys' owner, and receiving this rank's from the rank that used its keys."""
        ...

    def abandon(self) -> None:
        """After an error, leave nothing that a later pass would wait for or take for its own."""
        ...


@contextlib.contextmanager
def abandon_on_error(hops: Transport | None) -> Iterator[None]:
    """Let a pass go on in the block, and give it up when that raises: whoever catches the error may begin another one."""
    try:
        yield
    except Exception:
        if hops is not None:
            hops.abandon()
        raise


def add_home(dkv: Tensor, homeward: tuple[Arriving, Sequence[Range]] | None) -> None:
    """Add a partial that has come home to the gradients of the ranges it is of. Shapes: dkv (S, 2, B, K, D)."""
    if homeward is None:
        return
    arriving, ranges = homeward
    parts = arriving.wait().split_with_sizes([end - start for start, end in ranges])
    for (start, end), part in zip(ranges, parts, strict=True):
        dkv[start:end] += part
    arriving.release()
