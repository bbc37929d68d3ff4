"""What an error of a message between ranks is said to mean. tests/cluster has the errors themselves, on two nodes."""

from __future__ import annotations

import resource
import socket

import pytest
import torch.distributed as dist

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from tests.comm.comm_ranks import named_connection_error

CONNECTION_CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:21733."


def test_errors_that_are_not_of_a_message_have_no_other_name():
    assert comm.connection_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert comm.connection_error(SequenceParallelError("of gloo/")) is None


@pytest.mark.parametrize(
    ("variable", "error"),
    [
        ("GLOO_SOCKET_IFNAME", RuntimeError("[gloo/transport/tcp/device.cc:84] Unable to find address for: eth9")),
        ("NCCL_SOCKET_IFNAME", dist.DistBackendError("NCCL error\nLast error:\nBootstrap : no socket interface found")),
    ],
)
def test_an_interface_that_is_not_there_is_named_with_its_variable(monkeypatch, variable, error):
    monkeypatch.setenv(variable, "eth9")
    said = str(comm.connection_error(error))
    assert said.startswith(f"{variable}='eth9' on host {socket.gethostname()}: there is no such network interface")
    assert "this host has lo" in said
    assert f"set {variable} to the one by which the nodes reach each other" in said


def test_a_process_without_room_for_a_connection_is_told_its_own_limit():
    error = RuntimeError(
        "[enforce fail at gloo/transport/tcp/loop.cc:105] fd_ != -1. epoll_create: Too many open files"
    )
    assert not comm.is_of_other_ranks(error)
    assert comm.is_of_other_ranks(RuntimeError(CONNECTION_CLOSED))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert str(comm.connection_error(error)).startswith(
        f"this process may have {allowed} files open, and a connection to each"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [("lo", "GLOO_SOCKET_IFNAME='lo' on host "), (None, "GLOO_SOCKET_IFNAME is not set, so gloo took the address of")],
)
def test_ranks_that_do_not_reach_one_another_are_told_what_gloo_took(monkeypatch, given, words):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if given:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    error = RuntimeError("Gloo connectFullMesh failed with [gloo/pair.cc:152] SO_ERROR: Connection refused")
    assert words in str(comm.connection_error(error))


def test_an_address_that_is_not_this_hosts_is_named_before_it_is_tried(caplog):
    for own in ("127.0.0.1", "localhost", socket.gethostname()):
        comm.check_address_here(own)
    assert not caplog.records
    comm.check_address_here("192.0.2.1")  # of documents alone
    (record,) = caplog.records
    assert "MASTER_ADDR='192.0.2.1' is no address of host " in record.getMessage()
    with pytest.raises(SequenceParallelError, match=r"^MASTER_ADDR='nowhere\.invalid' has no address, asked of host "):
        comm.check_address_here("nowhere.invalid")


@pytest.mark.parametrize("given", ["abc", "", "0", "-1", "65536", "29500.5"])
def test_what_is_no_port_is_named_before_it_is_tried(monkeypatch, given):
    monkeypatch.setenv("MASTER_PORT", given)
    with pytest.raises(
        SequenceParallelError, match=rf"^MASTER_PORT={given!r}: must be a whole number from 1 to 65535, "
    ):
        comm.check_port()
    for right in ("1", "29500", "65535"):
        monkeypatch.setenv("MASTER_PORT", right)
        comm.check_port()
    monkeypatch.delenv("MASTER_PORT")
    comm.check_port()


def test_a_port_that_is_taken_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29500")
    error = dist.DistNetworkError("The server socket has failed to listen. port: 29500, code: -98, name: EADDRINUSE")
    assert str(comm.connection_error(error)).startswith("MASTER_PORT='29500' on host ")


def test_a_store_that_is_not_reached_is_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    said = str(comm.connection_error(dist.DistNetworkError("The client socket has timed out after 5000ms")))
    assert said.startswith("the ranks did not meet at MASTER_ADDR='10.0.0.1', MASTER_PORT='29500'")


@pytest.mark.parametrize(
    "text",
    [
        CONNECTION_CLOSED,
        "Application timeout caused pair closure",
        "rank 1 of the ring has ended; rank 0 was at the signal DONE",
        "rank 0 of the ring waited 5 s for rank 1's signal DONE",
    ],
)
def test_a_rank_that_is_lost_is_named_with_the_time_limit(pools, text):
    for rank, said in enumerate(pools(2).run(named_connection_error, text)):
        assert said.startswith(f"rank {rank} of 2 on host {socket.gethostname()} has lost another rank")
        assert "after timeout_s=480 s at the latest" in said
        assert said.endswith(f"({text})")
