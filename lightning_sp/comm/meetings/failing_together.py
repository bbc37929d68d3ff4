"""Ranks that fail together: where one fails by itself, the others stop before their next collective, not in it.

    rank 0    meets ... collective ... meets: waits for rank 1 ......... is told, and stops
    rank 1    meets ... collective ... raises an error of its own: tells

A wait in a collective cannot be interrupted. So within `failing_together` the ranks of a group meet in the store before each: all go on, or
none. A step of training does not pay for that; a trial of one does, for its error may be answered. Each says what it comes for: ranks that
come to different collectives would read each other's bytes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as _c10d

from lightning_sp.comm.meetings.circular_waits import Arrival, CircularWaits, came_apart
from lightning_sp.users_line import users_place

_GO_ON, _STOP = "1", "2"
# How long a rank that fails tells that: the store's host may be out of reach.
_PATIENCE_S = 5.0
_numbers = itertools.count()


class PeerError(RuntimeError):
    """Another rank has failed by itself; what it says itself is the reason."""


class _Meetings:
    """The meetings of one block of code, by group; a class because it counts them.

    <key>/failed                     there where a rank has failed
    <key>/groups                     how many names of groups are there, one from each rank of it
    <key>/groups/<number>            a name
    <key>/<group>                    how many have come to its meetings, all together
    <key>/<group>/<meeting>          whether they go on
    <key>/<group>/<meeting>/for      what the first of them has come for, its rank and its line
    """

    def __init__(self) -> None:
        self._store, self._key = _c10d._get_default_store(), f"lightning_sp/meetings/{next(_numbers)}"
        self.waits = CircularWaits(self._store, self._key, _STOP)
        self._threads = {threading.get_ident()}
        self._count: dict[str, int] = {}  # of this rank's meetings, by group

    @property
    def is_here(self) -> bool:
        """Whether this thread is the one that began, or its backward's: others, a loader's say, come to their collectives at other times."""
        return threading.get_ident() in self._threads

    def follow(self) -> None:
        """Meet in this thread, too."""
        self._threads.add(threading.get_ident())

    def meet(self, group: ProcessGroup, what: str) -> None:
        """Wait until all of a group are here for the same collective, or one has failed.

        Args:
            group: whose.
            what: the collective.

        Raises:
            PeerError: one has failed, of this group or of another that one of this group waits for.
            SequenceParallelError: the first that came has come for another collective, or waits for this rank in one of another group.
        """
        store, size, ranks = self._store, dist.get_world_size(group), dist.get_process_group_ranks(group)
        name = f"{size}/{group.group_name}/{ranks[0]}"
        key = f"{self._key}/{name}"
        if name not in self._count:
            number = store.add(f"{self._key}/groups", 1)
            store.set(f"{self._key}/groups/{number}", name)
        own = self._count[name] = self._count.get(name, -1) + 1
        self._compare(f"{key}/{own}/for", what)
        come = store.add(key, 1)
        meeting = (come - 1) // size
        decision = f"{key}/{meeting}"
        if come % size == 0:
            told = store.compare_set(decision, "", _GO_ON).decode()
            for read in (f"{key}/{meeting - 1}", f"{key}/{meeting}/for"):  # by all, for all are here
                store.delete_key(read)
        elif store.check([f"{self._key}/failed"]):
            told = store.compare_set(decision, "", _STOP).decode()
        else:
            told = self.waits.decision(decision, ranks, what, users_place())
        if told != _GO_ON:
            raise PeerError("another rank has failed by itself")

    def _compare(self, key: str, what: str) -> None:
        """Refuse what is not the first's, before this rank has come: the others wait, and are told that it has failed."""
        own = Arrival(what, dist.get_rank(), users_place())
        found = self._store.compare_set(key, "", f"{own.what}\n{own.rank}\n{own.line}").decode()
        first, rank, line = found.split("\n")
        if first != what:
            raise came_apart(Arrival(first, int(rank), line), own)

    def fail(self) -> None:
        """Let those who wait for this rank, or come to wait for it, stop. In a thread: a store out of reach would hold this rank up."""
        telling = Thread(target=self._tell, daemon=True)
        telling.start()
        telling.join(_PATIENCE_S)

    def _tell(self) -> None:
        store = self._store
        with suppress(dist.DistError, RuntimeError):
            # First this, then who has come so far: who comes later looks here before it waits.
            store.set(f"{self._key}/failed", "")
            keys = [f"{self._key}/groups/{number + 1}" for number in range(store.add(f"{self._key}/groups", 0))]
            for name in {store.get(key).decode() for key in keys if store.check([key])}:
                come, size = store.add(f"{self._key}/{name}", 0), int(name.partition("/")[0])
                store.compare_set(f"{self._key}/{name}/{come // size}", "", _STOP)


_current: list[_Meetings] = []


@contextmanager
def failing_together() -> Iterator[None]:
    """Let no rank wait in a collective for one that has failed within. Every rank must call it; it ends together.

    Communicates: for each collective, and at the end, three entries in the store for each rank of its group.

    Raises:
        PeerError: another rank has failed.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    meetings = _Meetings()
    _current.append(meetings)
    try:
        yield
        check_peers(None, "the end")
    except BaseException:
        meetings.fail()
        raise
    finally:
        meetings.waits.close()
        _current.remove(meetings)


def check_peers(group: ProcessGroup | None, what: str, tensor: Tensor | None = None) -> None:
    """Stop before a collective of a group (the world for None) for which a rank that has failed will not come. Every rank of it must call it.

    Args:
        group: whose collective.
        what: its name.
        tensor: of the same shape and dtype on all ranks; None where they need not be.

    Communicates: nothing outside of `failing_together`.

    Raises:
        PeerError: another rank has failed.
        SequenceParallelError: another rank comes to another collective, of this group or of another.
    """
    if not _current or not _current[-1].is_here:
        return
    whole = dist.group.WORLD if group is None else group
    assert whole is not None
    if dist.get_world_size(whole) > 1:
        shown = "" if tensor is None else f" of {tuple(tensor.shape)}, {tensor.dtype}"
        _current[-1].meet(whole, f"{what}{shown}")


def meets_in_backward(loss: Tensor) -> None:
    """Let the ranks meet in a loss' backward, too, which runs in a thread of its own on a GPU."""
    if _current:
        loss.register_hook(lambda _: _current[-1].follow() if _current else None)  # type: ignore[no-untyped-call]


class _Checked:
    """A collective of FSDP2's that the ranks meet before.

    Args:
        own: FSDP2's, or what it was given.
    """

    def __init__(self, own: Any) -> None:
        self.own = own

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a buffer for FSDP2 to fill or to receive in."""
        buffer: Tensor = self.own.allocate(*args, **kwargs)
        return buffer


class CheckedAllGather(_Checked):
    """An all-gather of a unit's parameters."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        """Gather as FSDP2 asks for it. Raises: PeerError: another rank has failed."""
        check_peers(group, "FSDP2's all-gather", input_tensor)
        return self.own(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)


class CheckedReduceScatter(_Checked):
    """A reduce-scatter of a unit's gradients, behind which FSDP2 may reduce over replicas by itself: all ranks meet."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce as FSDP2 asks for it. Raises: PeerError: another rank has failed."""
        check_peers(None, "FSDP2's reduce-scatter", input_tensor)
        return self.own(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op)
