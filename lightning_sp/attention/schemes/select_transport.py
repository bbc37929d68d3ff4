"""Which transport carries a pass round the ring: the one asked for, or the first that can."""

from __future__ import annotations

from lightning_sp.attention.schemes.cpu_shared_memory import SharedMemoryTransport
from lightning_sp.attention.schemes.network import NetworkTransport
from lightning_sp.attention.schemes.transport import Transport

# By their names in `config.RING_TRANSPORTS`; "auto" tries them in this order.
TRANSPORTS: dict[str, type[Transport]] = {"shared_memory": SharedMemoryTransport, "network": NetworkTransport}


def transports_for(name: str) -> tuple[type[Transport], ...]:
    """Return those that are tried, in their order; the network serves always."""
    return tuple(TRANSPORTS.values()) if name == "auto" else (TRANSPORTS[name],)
