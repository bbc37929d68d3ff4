"""Ranks of one host listen on its loopback alone, where no other host reaches them.

torch's store listens on all interfaces unless it is given a socket that listens already. gloo takes the address of the host's name unless a
variable names an interface.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

_VARIABLE = "GLOO_SOCKET_IFNAME"
# Linux, and BSD with macOS.
_NAMES = ("lo", "lo0")
_BACKLOG = 2048


def listening_on_loopback(address: str, port: int) -> int | None:
    """Return a socket's descriptor that listens at an address of the loopback, for torch's store, which then owns it.

    Args:
        address: at which ranks are to meet.
        port: likewise.

    Returns:
        None where the address is of a network, or the port is taken: by this process' own store, or by another, which torch's store says.
    """
    try:
        found = sorted(
            {(family, where[0]) for family, *_, where in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)}
        )
    except (OSError, UnicodeError):
        return None
    if not found or not all(ipaddress.ip_address(where).is_loopback for _, where in found):
        return None
    family, where = found[0]
    with socket.socket(family, socket.SOCK_STREAM) as listens, suppress(OSError):
        listens.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listens.bind((where, port))
        listens.listen(_BACKLOG)
        return listens.detach()
    return None


class LoopbackOfRun:
    """Has gloo's groups on the loopback while a run lasts. A class because the variable is put back: other programs read it."""

    def __init__(self) -> None:
        self._is_set = False

    def start(self) -> None:
        """Name the loopback to gloo, unless the user has named an interface."""
        names = [name for _, name in socket.if_nameindex() if name in _NAMES]
        if names and not os.environ.get(_VARIABLE):
            os.environ[_VARIABLE] = names[0]
            self._is_set = True

    def stop(self) -> None:
        """Put the variable back; groups that are there keep their sockets."""
        if self._is_set:
            os.environ.pop(_VARIABLE, None)
            self._is_set = False
