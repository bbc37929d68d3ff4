"""Errors of the connections between ranks: known by their words, for backends raise plain errors, and said in this package's.

Owns what is told of them, not that ranks agree on anything: after such an error they cannot.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
from typing import Any

import torch.distributed as dist

from lightning_sp.comm.groups import timeout_s
from lightning_sp.errors import SequenceParallelError, text_of

log = logging.getLogger(__name__)

# gloo names the place in its sources; shared memory speaks of the ring (`cpu/pipes.py`).
_OF_COMMUNICATION = ("gloo/", "pair closure", "Gloo connectFullMesh", "of the ring has ended", "of the ring waited")
_NO_INTERFACE = {
    "Unable to find address for": "GLOO_SOCKET_IFNAME",  # gloo
    "no socket interface found": "NCCL_SOCKET_IFNAME",  # NCCL
}
_NO_MESH = "connectFullMesh"
_NO_FILES = "Too many open files"
_PORT_TAKEN = "EADDRINUSE"


def is_of_communication(error: BaseException) -> bool:
    """Return whether an error is that of a message between ranks: too late, or of a rank that has ended."""
    text = text_of(error)
    return isinstance(error, dist.DistError) or any(mark in text for mark in _OF_COMMUNICATION)


def is_of_other_ranks(error: BaseException) -> bool:
    """Return whether an error of a message is another rank's affair: not this process' own limit, and not named yet."""
    return (
        is_of_communication(error) and not isinstance(error, SequenceParallelError) and _NO_FILES not in text_of(error)
    )


def connection_error(error: BaseException, told: str = "") -> SequenceParallelError | None:
    """Return what an error of a message between ranks means: what was given, the rule, the remedy. None for any other error.

    Without communication: each rank says what it knows itself, and what it was told.

    Args:
        error: what was raised.
        told: why another rank is lost, if any rank knows (`hangs.leave_run`).
    """
    if isinstance(error, SequenceParallelError) or not is_of_communication(error):
        return None
    text = text_of(error)
    said = text.strip().split("\n")[0].partition(" This is typically caused by")[0]
    for words, variable in _NO_INTERFACE.items():
        if words in text:
            return SequenceParallelError(
                f"{variable}={os.environ.get(variable)!r} on host {socket.gethostname()}: there is no such network interface, or it has no "
                f"address; {_interfaces()}: set {variable} to the one by which the nodes reach each other ({said})"
            )
    if _NO_FILES in text:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return SequenceParallelError(
            f"this process may have {allowed} files open, and a connection to each other rank is one or more of them: raise the limit where "
            f"ranks are started (ulimit -n 65536), or let the loader's workers share less (torch.multiprocessing.set_sharing_strategy) ({said})"
        )
    if _PORT_TAKEN in text:
        return SequenceParallelError(
            f"MASTER_PORT={os.environ.get('MASTER_PORT')!r} on host {socket.gethostname()} is another process's, of another run say: "
            f"ranks would meet there; unset MASTER_PORT, and a free one is chosen, or give another ({said})"
        )
    if _NO_MESH in text:
        return SequenceParallelError(f"{_no_mesh()} ({said})")
    if not dist.is_initialized():
        return SequenceParallelError(
            f"the ranks did not meet at MASTER_ADDR={os.environ.get('MASTER_ADDR')!r}, MASTER_PORT={os.environ.get('MASTER_PORT')!r}: rank 0 "
            f"listens there, and every rank must reach it within start_timeout_s; start all ranks, and name an address of rank 0's host that "
            f"{socket.gethostname()} reaches ({said})"
        )
    if told:
        return SequenceParallelError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} on host {socket.gethostname()} has lost another rank: {told}\nWhere a rank "
            f"ends, or is late, all end, after timeout_s={timeout_s():g} s at the latest; go on from the last checkpoint, trainer.fit(..., "
            f"ckpt_path=...) ({said})"
        )
    return SequenceParallelError(
        f"rank {dist.get_rank()} of {dist.get_world_size()} on host {socket.gethostname()} has lost another rank: every rank takes part in "
        f"every collective, so where one ends, or its node or link is down, all end, after timeout_s={timeout_s():g} s at the latest; the log "
        "of the rank that ended first says why; if none has ended, one was later than that, and a larger timeout_s helps; go on from the last "
        f"checkpoint, trainer.fit(..., ckpt_path=...) ({said})"
    )


def check_port() -> None:
    """Refuse a MASTER_PORT that no process can listen at. Without communication.

    Raises:
        SequenceParallelError: with what is given.
    """
    given = os.environ.get("MASTER_PORT")
    if given is not None and not (given.isdecimal() and 0 < int(given) < 1 << 16):
        raise SequenceParallelError(
            f"MASTER_PORT={given!r}: must be a whole number from 1 to 65535, the port at which rank 0 listens; where this script starts the "
            "ranks of its host, unset it, and a free one is chosen"
        )


def check_address_here(address: str) -> None:
    """Refuse an address that is no host's, and warn of another host's, where all ranks are of this host and are to meet at it.

    Without communication. Otherwise they would try for as long as a start may take.

    Raises:
        SequenceParallelError: it cannot be resolved.
    """
    rule = "all ranks of num_nodes=1 are started on this host, and meet there; unset MASTER_ADDR, which another job may have left"
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SequenceParallelError(
            f"MASTER_ADDR={address!r} has no address, asked of host {socket.gethostname()}: {rule} ({error})"
        ) from error
    if not any(_is_own(family, where) for family, _, _, _, where in found):
        # A router may lead it back to this host.
        log.warning(f"sequence_parallel: MASTER_ADDR={address!r} is no address of host {socket.gethostname()}: {rule}")


def _is_own(family: int, where: tuple[Any, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((where[0], 0, *where[2:]))
        except OSError:
            return False
    return True


def _no_mesh() -> str:
    given, host = os.environ.get("GLOO_SOCKET_IFNAME"), socket.gethostname()
    if given:
        taken = f"GLOO_SOCKET_IFNAME={given!r} on host {host}"
    else:
        taken = f"GLOO_SOCKET_IFNAME is not set, so gloo took the address of the host name {host!r}, else the loopback"
    return (
        f"the ranks met, and cannot reach one another over gloo: {taken}; each rank must be reached at the address of its interface; "
        f"{_interfaces()}: set GLOO_SOCKET_IFNAME to the one by which the nodes reach each other, on every node (on GPUs NCCL_SOCKET_IFNAME "
        "too), and let no firewall stand between them"
    )


def _interfaces() -> str:
    return f"this host has {', '.join(name for _, name in socket.if_nameindex())}"
