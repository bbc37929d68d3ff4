"""The runs of a world, which are watched one after the other over one connection."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from lightning_sp.comm.groups import cached_per_world, when_destroyed
from lightning_sp.comm.hangs.main_thread import place_of_error
from lightning_sp.comm.hangs.meeting import Meeting
from lightning_sp.comm.hangs.raised import raised
from lightning_sp.comm.hangs.report import Report, State, process_here, told_places
from lightning_sp.comm.hangs.side_channel import SideChannel
from lightning_sp.comm.hangs.watch import STAYS_S, RunWatch

# What this process has told of a world that it has destroyed in a run: the world, and what is kept for it, is gone then.
_destroyed: list[str] = []
# No world has as many runs.
_BEHIND_ALL = 10**9


class _Runs:
    """Counts the runs of this rank in a world: ranks that do not agree on it are not in one run."""

    def __init__(self) -> None:
        self.channel, self.number = SideChannel(), 0
        self.current: RunWatch | None = None
        self.is_failing = False

    def end(self) -> None:
        """End with the world, in the thread that destroys it; in the channel's while that connects to the store, as a run begins."""
        if self.current is not None and not self.channel.is_here and (told := self.current.end_of_world()):
            _destroyed.append(told)
        self.channel.close()


@cached_per_world
def _runs() -> _Runs:
    runs, world = _Runs(), dist.group.WORLD
    assert world is not None
    when_destroyed(world, runs.end)
    return runs


def watch_run(*, hang_s: float, limit_s: float, at: Callable[[], str], last: Callable[[], None] = lambda: None) -> None:
    """Watch the run that this thread begins, until it ends; the one before has ended. Without ranks, nothing.

    Args:
        hang_s: after how long a rank that others wait for is named.
        limit_s: after how long one that does nothing ends the run, also while collectives have longer.
        at: says the stage and step; called by another thread.
        last: is called by that thread before it ends the process.

    Communicates: two entries in the store for each run, and one is read every other second.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    end_run()
    _destroyed.clear()
    runs = _runs()
    runs.number += 1
    runs.is_failing = False
    runs.current = RunWatch(runs.channel, run=runs.number, hang_s=hang_s, limit_s=limit_s, at=at, last=last)


def end_run() -> None:
    """Watch the run no more: it has ended as it should, or the others know of its error."""
    if dist.is_initialized() and dist.get_world_size() > 1 and (current := _runs().current) is not None:
        current.stop()
        _runs().current = None
        _runs().channel.close()


def is_in_run() -> bool:
    """Return whether this process' last run has not ended well: it goes on, or has failed. Any thread may ask."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    return _runs().current is not None or _runs().is_failing


def is_watched() -> bool:
    """Return whether a run of this rank is watched."""
    return dist.is_initialized() and dist.get_world_size() > 1 and _runs().current is not None


def tell_end_of_script() -> None:
    """Tell the ranks that this one begins no run any more: one that they have begun without it would wait for it in vain.

    Communicates: one entry in the store.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _tell_end("has come to the end of its script")
    _runs().channel.close()


def tell_error_of_script(error: BaseException) -> None:
    """Tell the ranks of an error outside of a run that ends this one's script: they may wait for it in what all call behind a run.

    Communicates: three entries in the store; waits for at most 2.5 s for the others to read them.
    """
    if not _is_between_runs():
        return
    runs, rank = _runs(), dist.get_rank()
    why = raised(error, place_of_error(error))
    _tell_end(why)
    # What others call behind the run is watched as their next one.
    meeting = Meeting(runs.channel, run=runs.number + 1, rank=rank, world=dist.get_world_size())
    meeting.end(f"rank {rank} {why}, behind run {runs.number}")
    meeting.acknowledge()
    meeting.wait_for_all(STAYS_S)
    runs.channel.close()


def why_scripts_ended() -> str:
    """Return which ranks' scripts have ended, and why; empty for none. Where rank 0's has, the store may have ended with it.

    Communicates: one request to the store.
    """
    if not _is_between_runs():
        return ""
    runs, rank = _runs(), dist.get_rank()
    meeting = Meeting(runs.channel, run=runs.number + 1, rank=rank, world=dist.get_world_size())
    ended = [each for each in meeting.reports() if each.is_in(_BEHIND_ALL)]
    is_gone = runs.channel.silent_s > 0
    runs.channel.close()
    if is_gone:
        return (
            "the store of the ranks, in rank 0's process or its launcher's, has ended: rank 0's script is over, or it was killed, and its own "
            "output says why"
        )
    return told_places(ended)


def _is_between_runs() -> bool:
    """Return whether this rank has been in a run, which has ended well."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return _runs().number > 0 and _runs().current is None and not _runs().is_failing


def _tell_end(why: str) -> None:
    """Say that this rank begins no run any more."""
    runs, rank = _runs(), dist.get_rank()
    own = Report(
        rank=rank, run=_BEHIND_ALL, at=f"run {runs.number}", state=State.ENDED, why=why, process=process_here()
    )
    Meeting(runs.channel, run=_BEHIND_ALL, rank=rank, world=dist.get_world_size()).tell(own)


def destroyed_in_run() -> str:
    """Return where this rank has destroyed its process groups while a run was on, empty if it has not; once for each time."""
    return _destroyed.pop() if _destroyed else ""


def leave_run(error: BaseException, *, is_lost: bool) -> str:
    """Tell the other ranks of an error that ends this rank's run, and return why they say that it ends; empty for nothing.

    Args:
        error: what was raised.
        is_lost: the error is that another rank is gone or late, and the reason is there.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or (current := _runs().current) is None:
        return ""
    _runs().is_failing = True
    return current.leave(error, is_lost=is_lost)
