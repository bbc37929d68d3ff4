"""Bytes between this process and others, as the kernel counts them: a transfer that is only slow is no hang.

gloo's threads send and receive while the main thread waits. Nothing of it is seen from Python, so the sockets themselves are asked.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

# Of linux/tcp.h, struct tcp_info: tcpi_unacked; tcpi_bytes_acked and tcpi_bytes_received; tcpi_notsent_bytes.
_UNACKED, _BYTES, _NOT_SENT = (struct.Struct("=I"), 24), (struct.Struct("=QQ"), 120), (struct.Struct("=I"), 144)
_TCP_INFO_BYTES = 148
# Of a wait of seconds: what keeps a connection alive, or a logger's word. No transfer is so slow.
_NOTHING_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What this process' TCP connections have moved.

    Args:
        num_bytes: sent and acknowledged, or received, since they were made.
        in_flight: some are on their way: not sent, not acknowledged or not read.
    """

    num_bytes: int
    in_flight: bool

    def is_quiet_since(self, before: Traffic) -> bool:
        """Return whether nothing is on its way and hardly anything was since."""
        return not self.in_flight and abs(self.num_bytes - before.num_bytes) < _NOTHING_BYTES


def traffic(without_port: int | None) -> Traffic | None:
    """Return the traffic of all TCP connections but those with one port: the store's. None where the system does not tell."""
    num_bytes, in_flight = 0, False
    if socket.getdefaulttimeout() is not None:
        return None  # it would be given to the connections that are looked at
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return None
    for each in descriptors:
        try:
            if not os.readlink(f"/proc/self/fd/{each}").startswith("socket:"):
                continue
            # A second descriptor of the same connection: to close it leaves the connection as it is.
            with socket.socket(fileno=os.dup(int(each))) as connection:
                found = _of_connection(connection, without_port)
        except OSError:
            continue
        if found is None:
            return None
        num_bytes, in_flight = num_bytes + found.num_bytes, in_flight or found.in_flight
    return Traffic(num_bytes=num_bytes, in_flight=in_flight)


def _of_connection(connection: socket.socket, without_port: int | None) -> Traffic | None:
    """Return a connection's traffic, none of what is no connection; None where the kernel counts no bytes."""
    none = Traffic(num_bytes=0, in_flight=False)
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return none
    peer = connection.getpeername()  # a socket that listens raises OSError
    if without_port in (peer[1], connection.getsockname()[1]):
        return none
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _TCP_INFO_BYTES:
        return None
    (unacked,), (not_sent,) = (layout.unpack_from(info, offset) for layout, offset in (_UNACKED, _NOT_SENT))
    acked, received = _BYTES[0].unpack_from(info, _BYTES[1])
    return Traffic(num_bytes=acked + received, in_flight=bool(unacked or not_sent or _has_unread(connection)))


def _has_unread(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return False
