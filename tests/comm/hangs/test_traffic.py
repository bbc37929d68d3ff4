"""Bytes on their way, as the kernel tells of this process' connections."""

from __future__ import annotations

import socket
import time

import pytest

from lightning_sp.comm.hangs.traffic import Traffic, traffic


@pytest.fixture
def connection():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other, server.getsockname()[1]


def settled(port=None):
    """What is on its way is acknowledged within a moment."""
    time.sleep(0.05)
    found = traffic(port)
    if found is None:
        pytest.skip("this kernel counts no bytes of a connection")
    return found


def test_bytes_that_nobody_reads_are_on_their_way(connection):
    one, other, port = connection
    before = settled()
    one.sendall(b"x" * 1000)
    unread = settled()
    assert unread.in_flight
    assert unread.num_bytes - before.num_bytes == 2000  # sent and acknowledged by the one, received by the other
    assert not unread.is_quiet_since(before)
    without = settled(port)
    assert without.num_bytes <= before.num_bytes
    other.recv(1000)
    assert settled().is_quiet_since(before)
    one.sendall(b"x" * 40_000)
    assert len(other.recv(40_000, socket.MSG_WAITALL)) == 40_000
    assert not settled().is_quiet_since(before)


def test_bytes_that_do_not_fit_the_kernel_are_on_their_way(connection):
    one, _, _ = connection
    one.setblocking(False)
    sent = one.send(b"x" * 50_000_000)
    assert sent < 50_000_000
    assert settled().in_flight


def test_a_default_time_limit_is_not_given_to_connections(connection):
    socket.setdefaulttimeout(5.0)
    try:
        assert traffic(None) is None
    finally:
        socket.setdefaulttimeout(None)
    assert connection[0].gettimeout() is None


def test_a_transfer_is_not_quiet_and_a_word_is():
    before = Traffic(num_bytes=1000, in_flight=False)
    assert Traffic(num_bytes=1100, in_flight=False).is_quiet_since(before)
    assert not Traffic(num_bytes=101_000, in_flight=False).is_quiet_since(before)
    assert not Traffic(num_bytes=1000, in_flight=True).is_quiet_since(before)
