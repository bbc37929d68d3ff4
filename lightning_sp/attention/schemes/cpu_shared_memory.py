"""CPU ranks of one machine: the hops of one ring pass through shared memory. Keys, values and their gradients are written once and read where
they lie.

    this rank's arena   [ k, v of all its tokens | partial | partial ]
                              |                       |
                     read by every rank that     (dk, dv) of another rank's keys, in turn in one of two slots: read and added
                     needs some of them          by the keys' owner, while this rank computes the next hop

Every signal is a few bytes of a pipe: READY when k and v are written, DONE when they were used; in the backward HOME when a partial is written,
ADDED when its owner has added it. What is still read when a pass ends is waited for before the next one writes.

S local keys, B batch, K key-value heads, D head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from lightning_sp import comm
from lightning_sp.attention.plan.intervals import Range
from lightning_sp.attention.schemes.transport import RingNeighbours, num_tokens, pack_into, packed_shape, select_tokens
from lightning_sp.comm.cpu.pipes import Signal
from lightning_sp.comm.cpu.shared_memory import Arena, aligned, reserved_arena
from lightning_sp.devices import is_accelerator

# One is read by its owner while the next is written.
MAX_PARTIALS = 2


class Arrival:
    """Something of another rank's that is about to be ready in its memory.

    Args:
        slot: where it lies.
        ranges: which of its tokens are meant; none: nothing comes.
        ready: waits for the signal that it may be read.
        answer: tells its rank that it was read.
    """

    def __init__(
        self, slot: Tensor, ranges: Sequence[Range], ready: Callable[[], None], answer: Callable[[], None]
    ) -> None:
        self._slot, self._ranges, self._ready, self._answer = slot, ranges, ready, answer

    def wait(self) -> Tensor:
        """Return it, complete: in place where it is one range, else a copy. Shapes: (n, 2, B, K, D)."""
        if self._ranges:
            self._ready()
        return select_tokens(self._slot, self._ranges)

    def release(self) -> None:
        """Let its rank write there again."""
        if self._ranges:
            self._answer()


class SharedMemoryTransport:
    """One pass round the ring, its keys and values in shared memory; a class because it is a transfer in flight.

    Shapes: k and v (B, K, S, D). Communicates: four bytes of a pipe for every signal, nothing by the group.
    """

    def __init__(self, ring: RingNeighbours, arena: Arena, k: Tensor, v: Tensor) -> None:
        self._ring, self._arena = ring, arena
        self._shape, self._dtype, self._slot_bytes = packed_shape(k), k.dtype, _slot_bytes(k)
        self._sent: set[int] = set()
        self._answered: set[tuple[Signal, int]] = set()
        arena.begin()
        pack_into(self._slot(arena.rank, 0), k, v)
        for hop in range(1, ring.size):
            if ring.leaving(hop):
                arena.send(Signal.READY, ring.target(hop))
                arena.owe(Signal.DONE, ring.target(hop))

    @classmethod
    def begin_forward(
        cls, ring: RingNeighbours, k: Tensor, v: Tensor, saved_kv: Tensor | None, *, required: bool
    ) -> SharedMemoryTransport | None:
        """Begin a forward pass. Raises: as `reserved_arena`."""
        assert saved_kv is None
        arena = _reserved(ring, k, 1, required)
        return None if arena is None else cls(ring, arena, k, v)

    @classmethod
    def begin_backward(
        cls, ring: RingNeighbours, k: Tensor, v: Tensor, saved_kv: Tensor | None, *, required: bool
    ) -> SharedMemoryTransport | None:
        """Begin a backward pass, with room for partials too."""
        assert saved_kv is None
        arena = _reserved(ring, k, 1 + min(MAX_PARTIALS, ring.size - 1), required)
        return None if arena is None else cls(ring, arena, k, v)

    def start_keys(self, hop: int) -> Arrival:
        """Begin to wait for what this rank needs of the source's keys in a hop."""
        source = self._ring.source(hop)
        slot, answer = self._slot(source, 0), partial(self._answer, Signal.DONE, hop, source)
        return Arrival(slot, self._ring.needed(hop), partial(self._arena.wait, Signal.READY, source), answer)

    def send_home(self, hop: int, gradients: tuple[Tensor, Tensor] | None) -> Arrival:
        """Put a partial (dk, dv) where the keys' owner reads it, and begin to wait for this rank's from the rank that used its keys."""
        if gradients is not None:
            if hop - MAX_PARTIALS in self._sent:
                self._arena.wait(Signal.ADDED, self._ring.source(hop - MAX_PARTIALS))
            owner, slot = self._ring.source(hop), self._slot(self._arena.rank, _partial_slot(hop))
            pack_into(slot[: gradients[0].shape[2]], *gradients)
            self._arena.send(Signal.HOME, owner)
            self._arena.owe(Signal.ADDED, owner)
            self._sent.add(hop)
        user, tokens = self._ring.target(hop), num_tokens(self._ring.leaving(hop))
        slot, answer = self._slot(user, _partial_slot(hop)), partial(self._answer, Signal.ADDED, hop, user)
        return Arrival(slot, [(0, tokens)] if tokens else [], partial(self._arena.wait, Signal.HOME, user), answer)

    def abandon(self) -> None:
        """After an error, answer all that the other ranks wait for before they write again; what no one waits for stays of this turn."""
        for hop in range(1, self._ring.size):
            # A rank that has ended waits for nothing; the others do.
            with contextlib.suppress(RuntimeError):
                if self._ring.needed(hop):
                    self._answer(Signal.DONE, hop, self._ring.source(hop))
            with contextlib.suppress(RuntimeError):
                if self._ring.leaving(hop):
                    self._answer(Signal.ADDED, hop, self._ring.target(hop))

    def _answer(self, signal: Signal, hop: int, to: int) -> None:
        if (signal, hop) not in self._answered:
            self._answered.add((signal, hop))
            self._arena.send(signal, to)

    def _slot(self, rank: int, number: int) -> Tensor:
        """Return all of a rank's k and v (slot 0), or the memory of its partials (1 and on). Shapes: (S, 2, B, K, D)."""
        return self._arena.view(rank, number * self._slot_bytes, self._shape, self._dtype)


def _slot_bytes(k: Tensor) -> int:
    return aligned(2 * k.numel() * k.element_size())


def _reserved(ring: RingNeighbours, k: Tensor, slots: int, required: bool) -> Arena | None:
    if is_accelerator(k.device):
        return None
    return reserved_arena(comm.group_name(ring.group), slots * _slot_bytes(k), required=required)


def _partial_slot(hop: int) -> int:
    return 1 + (hop - 1) % MAX_PARTIALS
