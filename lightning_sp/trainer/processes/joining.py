"""How the ranks of a run meet, and what is said while some do not come: which variable of this process says that there are others.

Lightning starts the other ranks itself unless LOCAL_RANK is set. An earlier torchrun or SLURM shell may have left it, or another run: what
rank 0 starts inherits it. A rank then waits for ranks that nobody starts, for as long as a start may take.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError, told_error
from lightning_sp.trainer.processes.parent import STARTED_BY

# A process takes seconds to come so far, and a minute on a busy machine.
_SAID_S = 30.0
_LOOK_S, _GRACE_S = 1.0, 3.0
# How long a rank that cannot connect stays for the others to hear it: rank 0 holds the store.
_STAYS_S = 3.0
# Without a store ranks cannot connect. On a busy host an answer takes seconds.
_SILENT_S = 60.0
# What launchers and runs leave to the processes that are started after them.
_LEFT = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

log = logging.getLogger(__name__)


def check_local_rank(local_rank: int, num_devices: int) -> None:
    """Refuse a rank of this host that has no device.

    Raises:
        SequenceParallelError: with the variables that say so.
    """
    if not 0 <= local_rank < num_devices:
        raise SequenceParallelError(
            f"this process is rank {local_rank} of its host, and Trainer(devices=...) has {num_devices} there, 0 to {num_devices - 1}: unset "
            f"what an earlier torchrun or SLURM shell has left, or give as many devices as ranks are started ({_set(os.environ)})"
        )


def how_started(
    environment: Any, *, by_script: bool, num_nodes: int, num_processes: int, variables: Mapping[str, str]
) -> str:
    """Return who is to start the ranks, and what to do where nobody does; empty where this script has started all of them.

    Args:
        environment: Lightning's ClusterEnvironment.
        by_script: this process has started the other ranks of its host.
        num_nodes: of the Trainer.
        num_processes: ranks of this host.
        variables: of this process.
    """
    if type(environment) is not LightningEnvironment:
        return (
            f"{type(environment).__name__} was chosen by the variables of a launcher, which is to start all {environment.world_size()} ranks; "
            "in a shell that it has left unset them, or give Trainer(plugins=LightningEnvironment())"
        )
    nodes = ""
    if num_nodes > 1:
        nodes = (
            f"num_nodes={num_nodes}: the script is to be started on each node, with NODE_RANK=0 to {num_nodes - 1}, and MASTER_ADDR and "
            "MASTER_PORT of node 0"
        )
    elif variables.get("NODE_RANK", variables.get("GROUP_RANK", "0")) != "0":
        nodes = "num_nodes=1 has node 0 alone: unset NODE_RANK and GROUP_RANK, which an earlier run has left"
    if by_script or STARTED_BY in variables:
        return nodes
    here = (
        f"LOCAL_RANK={variables.get('LOCAL_RANK')!r} is set, so Lightning starts no ranks: whoever set it is to start {num_processes} on this "
        "host, LOCAL_RANK=0 and on; if an earlier torchrun or SLURM shell or another run has left it, unset "
        f"{', '.join(name for name in _LEFT if name in variables)}"
    )
    return f"{here}; {nodes}" if nodes else here


@contextmanager
def while_joining(how: str, *, rank: int, size: int, gone: Callable[[], str] = str) -> Iterator[Callable[[Any], None]]:
    """Say after a while that a rank waits for others that have not come, and say it with the error, if there is one.

    Where one of them has ended, or cannot connect, this process ends: it waits in native code, for as long as a start may take.

    Args:
        how: of `how_started`.
        rank: this one.
        size: how many there are to be.
        gone: says which of those that this process has started have ended; empty for none.

    Yields:
        What is to be told of the store that all ranks have met in, before they connect to one another.

    Raises:
        SequenceParallelError: they did not meet.
    """
    joined, connecting = threading.Event(), list[comm.Connecting]()

    def why() -> str:
        if ended := gone():
            return f"{ended} before the ranks have met: all of them are to come to trainer.fit"
        return _why_not_connected(connecting[0]) if connecting else ""

    def say() -> None:
        began, is_said = time.monotonic(), False
        while not joined.wait(_LOOK_S):
            if (told := why()) and not joined.wait(_GRACE_S):
                _leave(f"rank {rank} of {size} ends: {told}")
            if is_said or time.monotonic() - began < _SAID_S:
                continue
            is_said = True
            log.warning(
                f"sequence_parallel: rank {rank} of {size} on host {socket.gethostname()} has waited {_SAID_S:.0f} s for the others, at "
                f"MASTER_ADDR={os.environ.get('MASTER_ADDR')!r}, MASTER_PORT={os.environ.get('MASTER_PORT')!r}: "
                f"{how or 'each runs the script from its beginning, and one may take long before trainer.fit'}"
            )

    saying = threading.Thread(target=say, name="lightning_sp joining", daemon=True)
    saying.start()
    try:
        yield lambda store: connecting.append(comm.Connecting(store))
    except Exception as error:
        named = comm.connection_error(error)
        joined.set()  # what this rank tells is not for itself
        saying.join()
        for each in connecting:
            each.tell(f"rank {rank} on host {socket.gethostname()} has not connected: {told_error(named or error)}")
            time.sleep(_STAYS_S)
        if named is None:
            raise
        raise SequenceParallelError(f"{named}; {how}" if how else str(named)) from error
    finally:
        joined.set()
        saying.join()
        for each in connecting:
            each.close()


def _why_not_connected(connecting: comm.Connecting) -> str:
    """Return why ranks that have met do not connect; empty where they may."""
    if told := connecting.told():
        return told
    if connecting.silent_s > _SILENT_S:
        return (
            f"the store of the ranks, in rank 0's process or its launcher's, has not answered for {connecting.silent_s:.0f} s, and the ranks "
            "have not connected to one another: the log of rank 0 says why it has ended, if it has"
        )
    return ""


def _leave(why: str) -> None:
    sys.stderr.write(f"sequence_parallel: {why}\n")
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(1)


def _set(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={variables[name]}" for name in _LEFT if name in variables)
