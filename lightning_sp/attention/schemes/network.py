"""The hops of one ring pass by messages of the process group: every rank straight to every other that needs something of it.

S local keys, B batch, K key-value heads, D head dim.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from torch import Tensor

from lightning_sp.attention.schemes.transport import RingNeighbours, num_tokens, pack, packed_shape, select_tokens
from lightning_sp.comm.point_to_point import Transfer, next_pass


class NetworkTransport:
    """One pass round the ring by messages of the group; a class because it is a transfer in flight.

    Args:
        ring: who holds what.
        kv: this rank's keys and values, packed.
        saved_kv: where all that arrives is to stay; None where each hop has a buffer of its own.

    Shapes: kv (S, 2, B, K, D), saved_kv (n, 2, B, K, D).
    """

    def __init__(self, ring: RingNeighbours, kv: Tensor, saved_kv: Tensor | None = None) -> None:
        assert ring.group is not None
        self._ring, self._group, self._kv, self._saved_kv = ring, ring.group, kv, saved_kv
        self._turn = next_pass(ring.group)
        self._flying: list[Transfer] = []

    @classmethod
    def begin_forward(
        cls, ring: RingNeighbours, k: Tensor, v: Tensor, saved_kv: Tensor | None, *, required: bool
    ) -> NetworkTransport:
        """Begin a forward pass; messages serve everywhere."""
        return cls(ring, pack(k, v), saved_kv)

    @classmethod
    def begin_backward(
        cls, ring: RingNeighbours, k: Tensor, v: Tensor, saved_kv: Tensor | None, *, required: bool
    ) -> NetworkTransport:
        """Begin a backward pass, of gradients alone where keys and values were saved."""
        if saved_kv is None:
            return cls(ring, pack(k, v))
        return SavedKeysTransport(ring, k.new_empty(0, *packed_shape(k)[1:]), saved_kv)

    def start_keys(self, hop: int) -> Transfer | SavedKeys:
        """Start the hop that brings what this rank needs of the source's keys: (n, 2, B, K, D)."""
        ring, kv = self._ring, self._kv
        if self._saved_kv is None:
            own = kv.new_empty(num_tokens(ring.needed(hop)), *kv.shape[1:])
        else:
            own = self._saved_kv[slice(*ring.saved_range(hop))]
        return self._started(select_tokens(kv, ring.leaving(hop)), ring.target(hop), own, ring.source(hop))

    def send_home(self, hop: int, gradients: tuple[Tensor, Tensor] | None) -> Transfer:
        """Start sending a partial (dk, dv) to the keys' owner, and receiving this rank's from the rank that used its keys."""
        ring, kv = self._ring, self._kv
        sent = kv.new_empty(0) if gradients is None else pack(*gradients)
        received = kv.new_empty(num_tokens(ring.leaving(hop)), *kv.shape[1:])
        return self._started(sent, ring.source(hop), received, ring.target(hop))

    def abandon(self) -> None:
        """After an error, let what is in flight arrive: it belongs to no later pass. At once where all ranks failed in the same hop."""
        # A rank that failed in an earlier hop has sent nothing: the time limit then ends the group for every later pass, loudly.
        with contextlib.suppress(RuntimeError):
            for transfer in self._flying:
                transfer.wait()

    def _started(self, sent: Tensor, to: int, received: Tensor, source: int) -> Transfer:
        transfer = Transfer(sent, to, received, source, self._group, self._turn)
        self._flying = [*(each for each in self._flying if each.in_flight), transfer]
        return transfer


@dataclass(frozen=True)
class SavedKeys:
    """What has arrived long ago, as if it came now. Shapes: tokens (n, 2, B, K, D)."""

    tokens: Tensor

    def wait(self) -> Tensor:
        """Return it."""
        return self.tokens

    def release(self) -> None:
        """Say that it was used: nothing to do."""


class SavedKeysTransport(NetworkTransport):
    """The backward pass on keys and values that the forward saved: gradients alone travel.

    Shapes: as in `NetworkTransport`.
    """

    def start_keys(self, hop: int) -> SavedKeys:
        """Return what is there already: (n, 2, B, K, D)."""
        assert self._saved_kv is not None
        return SavedKeys(self._saved_kv[slice(*self._ring.saved_range(hop))])
