"""What a pass round the ring asks of whatever carries it, and keys and values as they travel.

They are packed token-major, so that any range of tokens is one contiguous message. S tokens, B batch, K key-value heads, D head dim:
(S, 2, B, K, D). Which transport serves is chosen in `select_transport`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

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

    def needed(self, hop: int) -> tuple[Range, ...]:
        """Return the ranges of the source's keys that this rank needs in a hop."""
        ...

    def leaving(self, hop: int) -> tuple[Range, ...]:
        """Return the ranges of this rank's keys that the target needs in a hop."""
        ...

    @property
    def group(self) -> ProcessGroup | None:
        """Return the ranks of the ring."""
        ...

    def saved_range(self, hop: int) -> Range:
        """Return where a hop's keys lie among those that are saved for the backward."""
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
    """One pass round the ring, in flight. Every way has its class, which begins the passes too."""

    @classmethod
    def begin_forward(
        cls, ring: RingNeighbours, k: Tensor, v: Tensor, saved_kv: Tensor | None, *, required: bool
    ) -> Transport | None:
        """Begin a forward pass: this rank's keys and values are ready for the others. Every rank of the ring must call it.

        Args:
            ring: who needs what of whom.
            k: local keys, of one shape on all ranks.
            v: local values.
            saved_kv: where all that arrives is to stay for the backward; None where each hop has a buffer of its own.
            required: whether it is this one or an error.

        Returns:
            None where it cannot serve, on all ranks alike.

        Shapes: (B, K, S, D) twice, ((R-1) S, 2, B, K, D).
        """
        ...

    @classmethod
    def begin_backward(
        cls, ring: RingNeighbours, k: Tensor, v: Tensor, saved_kv: Tensor | None, *, required: bool
    ) -> Transport | None:
        """Begin a backward pass; `saved_kv` holds what has arrived in the forward, where that was saved."""
        ...

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


class HomewardGradients:
    """The gradients of this rank's keys and values, to which the other ranks' partials come home: one hop at a time is in flight."""

    def __init__(self, ring: RingNeighbours, hops: Transport, dkv: Tensor) -> None:
        self._ring, self._hops = ring, hops
        self._dkv = dkv  # (S, 2, B, K, D), with this rank's own part
        self._arriving: Arriving | None = None
        self._ranges: tuple[Range, ...] = ()

    def send(self, hop: int, gradients: tuple[Tensor, Tensor] | None) -> None:
        """Send a hop's partial (dk, dv) home once the last hop's has been added here; None where this rank used no key."""
        self._add_arrived()
        self._arriving, self._ranges = self._hops.send_home(hop, gradients), self._ring.leaving(hop)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Add the last hop's partial and return (dk, dv), of all ranks' queries. Shapes: (B, K, S, D) twice."""
        self._add_arrived()
        return unpack(self._dkv)

    def _add_arrived(self) -> None:
        if self._arriving is None:
            return
        arriving, self._arriving = self._arriving, None
        parts = arriving.wait().split_with_sizes([end - start for start, end in self._ranges])
        for (start, end), part in zip(self._ranges, parts, strict=True):
            self._dkv[start:end] += part
        arriving.release()


def packed_shape(k: Tensor) -> tuple[int, ...]:
    """Return the shape of packed keys and values. Shapes: k (B, K, S, D)."""
    batch, heads, tokens, dim = k.shape
    return tokens, 2, batch, heads, dim


def empty_saved_kv(k: Tensor, ring_size: int, *, heads: int, tokens: int) -> Tensor:
    """Return room for the keys and values of all other ranks; a mask may need less of it.

    Args:
        k: keys of this rank, for rows, head dim and dtype, (B, K', t, D).
        ring_size: R.
        heads: K, key-value heads of this rank after Ulysses' exchange.
        tokens: T, of a ring rank.

    Shapes: () -> ((R-1) T, 2, B, K, D); (0,) for a ring of 1.
    """
    if ring_size == 1:
        return k.new_empty(0)
    return k.new_empty((ring_size - 1) * tokens, 2, k.shape[0], heads, k.shape[3])


def pack(k: Tensor, v: Tensor) -> Tensor:
    """Return both in new memory. Shapes: (B, K, S, D) twice -> (S, 2, B, K, D)."""
    packed = k.new_empty(packed_shape(k))
    pack_into(packed, k, v)
    return packed


def pack_into(packed: Tensor, k: Tensor, v: Tensor) -> None:
    """Write both into packed memory. Shapes: (S, 2, B, K, D), (B, K, S, D) twice."""
    packed[:, 0] = k.permute(2, 0, 1, 3)
    packed[:, 1] = v.permute(2, 0, 1, 3)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return views. Shapes: (S, 2, B, K, D) -> (B, K, S, D) twice."""
    k, v = packed.unbind(1)
    return k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


def select_tokens(packed: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return the tokens of the ranges, one after the other: a view where there is one range."""
    if len(ranges) == 1:
        return packed[slice(*ranges[0])]
    return torch.cat([packed[slice(*each)] for each in ranges]) if ranges else packed[:0]


def num_tokens(ranges: Sequence[Range]) -> int:
    """Return the tokens of all ranges."""
    return sum(end - start for start, end in ranges)
