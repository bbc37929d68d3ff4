"""Which transport carries a pass round the ring: the one asked for, or the first that can."""

from __future__ import annotations

from torch import Tensor

from lightning_sp.attention.schemes.cpu_shared_memory import SharedMemoryTransport
from lightning_sp.attention.schemes.network import NetworkTransport
from lightning_sp.attention.schemes.transport import RingNeighbours, Transport

# By their names in `config.RING_TRANSPORTS`; "auto" tries them in this order.
TRANSPORTS: dict[str, type[Transport]] = {"shared_memory": SharedMemoryTransport, "network": NetworkTransport}


def begin_forward(name: str, ring: RingNeighbours, k: Tensor, v: Tensor, saved_kv: Tensor | None) -> Transport:
    """Begin a forward pass by the transport of a name; see `Transport.begin_forward`."""
    for transport in _tried(name):
        begun = transport.begin_forward(ring, k, v, saved_kv, required=name != "auto")
        if begun is not None:
            return begun
    raise AssertionError(f"no transport {name!r} for this ring")


def begin_backward(name: str, ring: RingNeighbours, k: Tensor, v: Tensor, saved_kv: Tensor | None) -> Transport:
    """Begin a backward pass by the transport of a name; see `Transport.begin_backward`."""
    for transport in _tried(name):
        begun = transport.begin_backward(ring, k, v, saved_kv, required=name != "auto")
        if begun is not None:
            return begun
    raise AssertionError(f"no transport {name!r} for this ring")


def _tried(name: str) -> list[type[Transport]]:
    return list(TRANSPORTS.values()) if name == "auto" else [TRANSPORTS[name]]
