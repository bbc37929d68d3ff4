"""For tests, ours and users': run a function on several ranks, and compare sharded with whole.

The processes start once and serve many calls (a `RankPool`): to start a rank costs seconds, a test milliseconds.
No rank outlives the process that started it, whatever the rank does and however that process ends.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import queue
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from threading import Thread
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import ProcessGroupGloo


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# What the first call of a pool takes besides: its processes start.
_START_S = 30.0
# How often a call that waits looks whether its processes live.
_LOOK_S = 0.5


# What makes NCCL take several ranks of one GPU: it refuses two of one host, and believes what it is told of hosts (NCCL, "Environment
# Variables", NCCL_HOSTID). Messages go over sockets, and the device works for one process at a time: for tests, not for training.
_ONE_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1"}


class RankPool:
    """Processes of one world that run functions together. Use as a context manager.

    A call that fails ends the pool: ranks that have not answered are still in it, and their answers would be taken for those of the next call.

    Args:
        size: number of ranks.
        timeout_s: limit of each call and of each collective in it.
        others_s: how long the other ranks may still answer once one has failed.
        preload: modules that the ranks' server imports once for all ranks. The first pool of a process decides, for the server stays.
        device: "cpu" for ranks of gloo; "cuda" for ranks of NCCL that share the first GPU, each on a node of its own to NCCL and Lightning.

    Attributes:
        failure: why the pool has ended; None while it serves.
    """

    def __init__(
        self,
        size: int,
        *,
        timeout_s: float = 120.0,
        others_s: float = 15.0,
        preload: Sequence[str] = (),
        device: str = "cpu",
    ) -> None:
        self.size, self.timeout_s, self.others_s = size, timeout_s, others_s
        self.failure: str | None = None
        # The server imports once what every rank would: a rank then starts in a fraction of a second.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["lightning_sp", "lightning_sp.testing", *preload])
        self._tasks = [context.Queue() for _ in range(size)]
        self._results = context.Queue()
        # The store takes its port itself and stays here: a port that is only looked up may be another program's when rank 0 binds it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined,unused-ignore]
        self._processes = [
            context.Process(
                target=_serve,
                args=(rank, size, self._store.port, timeout_s, device, self._tasks[rank], self._results),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)` on every rank and return the results in rank order.

        Args:
            function: importable by name in a new process.
            args: picklable; the same on all ranks.

        Raises:
            RuntimeError: with the traceback of the rank that failed first, here or in an earlier call, which has ended the pool.
        """
        if self.failure is not None:
            raise RuntimeError(f"an earlier call ended this pool, make another: {self.failure}")
        # What interrupts a call, a test's time limit say, leaves its ranks in it.
        self.failure = "it was interrupted"
        for tasks in self._tasks:
            tasks.put((function, args))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline_s = time.monotonic() + self.timeout_s + _START_S
        while silent := set(range(self.size)) - results.keys() - failures.keys():
            try:
                rank, ok, value = self._results.get(timeout=min(_LOOK_S, max(deadline_s - time.monotonic(), 0)))
            except queue.Empty:
                # Those that live may still say what happened.
                if len(self._ended(silent)) == len(silent) or time.monotonic() >= deadline_s:
                    break
                continue
            if ok:
                results[rank] = ForkingPickler.loads(value)
            else:
                failures[rank] = value
            if failures:
                deadline_s = time.monotonic() + self.others_s
        if len(results) < self.size:
            self.failure = self._why(failures, set(range(self.size)) - results.keys() - failures.keys())
            self._kill()
            raise RuntimeError(self.failure)
        self.failure = None
        return [results[rank] for rank in range(self.size)]

    def _why(self, failures: dict[int, str], silent: set[int]) -> str:
        first = [f"rank {rank} of {self.size} failed first:\n{text}" for rank, text in list(failures.items())[:1]]
        ended = {rank: self._processes[rank].exitcode for rank in self._ended(silent)}
        within = f"{self.others_s:g} s more" if failures else f"{self.timeout_s + _START_S:g} s"
        told = f"no answer from ranks {sorted(silent)} within {within}; of them ended: {sorted(ended)}"
        if len(ended) == len(silent):
            told = f"ranks {sorted(silent)} have ended without an answer, with exit codes {[*ended.values()]}"
        return "\n".join(first + [told] * bool(silent))

    def _ended(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in sorted(ranks) if not self._processes[rank].is_alive()]

    def stop(self) -> None:
        """Tell the processes to end, without waiting for them."""
        for tasks in self._tasks:
            tasks.put(None)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """End the processes."""
        self.stop()
        if self.failure is not None:
            self._kill()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 120.0, others_s: float = 15.0
) -> list[Any]:
    """Call `function(*args)` once on `size` new gloo ranks and return the results in rank order."""
    with RankPool(size, timeout_s=timeout_s, others_s=others_s) as pool:
        return pool.run(function, *args)


def trainer_of_ranks(size: int) -> dict[str, Any]:
    """Return what a Trainer is told of the ranks that run: its accelerator, devices and nodes."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return {"accelerator": "gpu", "devices": 1, "num_nodes": size}
    return {"accelerator": "cpu", "devices": size}


def _end_with_parent() -> None:
    """End this process when the one that started the pool has ended. Its end closes a pipe, also when it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _share_gloo_device() -> None:
    """Have all groups of this process share one gloo device.

    torch gives each group a device, with a thread that looks for messages every 10 ms. A pool keeps the groups of all its calls: with 45 on
    each of 4 ranks the threads took 3% of a core for a rank that did nothing.
    """
    # Its options have no public name.
    gloo: Any = ProcessGroupGloo
    make = gloo.__init__
    device = gloo.create_device(interface=os.environ["GLOO_SOCKET_IFNAME"])

    def make_with_device(group: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        if not args and kwargs.keys() == {"timeout"}:
            options = gloo._Options()
            options._timeout, options._devices = kwargs["timeout"], [device]
            make(group, store, rank, size, options)
        else:
            make(group, store, rank, size, *args, **kwargs)

    gloo.__init__ = make_with_device


def _serve(rank: int, size: int, port: int, timeout_s: float, device: str, tasks: Any, results: Any) -> None:
    # A rank that sleeps, computes or waits for another rank reads no queue, so a thread of its own waits.
    Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    if sys.platform == "linux":
        # gloo's thread spins while another holds a pair's lock, and a thread that sends can be preempted with the lock by the one that it
        # wakes. Of 4 ranks on 2 cores that took 16% of the time. Threads of this policy, which they hand on to new ones, preempt no other.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # What the server imported stays: each fit ends with a collection of garbage, which would search all of it.
    gc.freeze()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)  # type: ignore[attr-defined,unused-ignore]
    world: dict[str, Any] = dict(store=store, rank=rank, world_size=size, timeout=timeout)
    if device == "cuda":
        os.environ.update(_ONE_GPU, NCCL_HOSTID=f"rank {rank}", LOCAL_RANK="0", NODE_RANK=str(rank))
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0), **world)
    else:
        _share_gloo_device()
        dist.init_process_group("gloo", **world)
    # A rank that a call ends at once would take those with it that are still connecting to it.
    if store.add("connected", 1) == size:
        store.set("all_connected", "")
    store.wait(["all_connected"])
    while (task := tasks.get()) is not None:
        function, args = task
        # Before the call is given up: where each thread stands says why there is no answer.
        faulthandler.dump_traceback_later(timeout_s + _START_S / 2)
        environment = dict(os.environ)
        try:
            # Here, for in the queue's own thread a failure would be a silence; and once, for each time keeps a descriptor of every tensor.
            value = bytes(ForkingPickler.dumps(function(*args)))
            results.put((rank, True, value))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
            # A seed that one call sets, say, is not the next one's.
            os.environ.clear()
            os.environ.update(environment)
    if dist.is_initialized():  # a function that was called may have done it
        dist.destroy_process_group()


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Return max|a - b| / max(1, max|b|): the measure of the law, tensor by tensor. Shapes must be equal."""
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} against {tuple(expected.shape)}"
    if actual.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp(min=1.0))


def assert_sharded_equals_unsharded(
    actual: Sequence[Tensor], expected: Sequence[Tensor], names: Sequence[str], tolerance: float = 1e-10
) -> None:
    """Assert the law for each tensor, naming those that break it with their numbers."""
    errors = {name: max_error(a, b) for name, a, b in zip(names, actual, expected, strict=True)}
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"sharded differs from unsharded by more than {tolerance:g}: {wrong}"
