"""The runs of a world, which are watched one after the other over one connection."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from lightning_sp.comm.groups import cached_per_world, when_destroyed
from lightning_sp.comm.hangs.side_channel import SideChannel
from lightning_sp.comm.hangs.watch import RunWatch

# What this process has told of a world that it has destroyed in a run: the world, and what is kept for it, is gone then.
_destroyed: list[str] = []


class _Runs:
    """Counts the runs of this rank in a world: ranks that do not agree on it are not in one run."""

    def __init__(self) -> None:
        self.channel, self.number = SideChannel(), 0
        self.current: RunWatch | None = None

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


def watch_run(*, hang_s: float, at: Callable[[], str]) -> None:
    """Watch the run that this thread begins, until it ends; the one before has ended. Without ranks, nothing.

    Args:
        hang_s: after how long a rank that others wait for is named.
        at: says the stage and step; called by another thread.

    Communicates: two entries in the store for each run, and one is read every other second.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    end_run()
    _destroyed.clear()
    runs = _runs()
    runs.number += 1
    runs.current = RunWatch(runs.channel, run=runs.number, hang_s=hang_s, at=at)


def end_run() -> None:
    """Watch the run no more: it has ended as it should, or the others know of its error."""
    if dist.is_initialized() and dist.get_world_size() > 1 and (current := _runs().current) is not None:
        current.stop()
        _runs().current = None
        _runs().channel.close()


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
    return current.leave(error, is_lost=is_lost)
