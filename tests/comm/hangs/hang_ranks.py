"""What the tests of hangs run on real ranks."""

from __future__ import annotations

import logging
import logging.handlers
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d

from lightning_sp import comm
from lightning_sp.comm.hangs.main_thread import Place
from lightning_sp.comm.hangs.meeting import Meeting
from lightning_sp.comm.hangs.report import Report, State
from lightning_sp.comm.hangs.runs import _runs
from lightning_sp.comm.hangs.side_channel import SideChannel, has_groups_of_others
from lightning_sp.comm.hangs.slow_ranks import SlowRanks

# No pool has that many runs.
_RUN = 10**9


def _gone(_):
    raise dist.DistNetworkError("the store has ended")


def slow_store():
    """Return what requests bring: one in time, one that is not waited for, the next one once the store answers again, and one that fails."""
    channel, go_on = SideChannel(), threading.Event()
    found = [channel.ask(lambda store: store.add("tests/slow", 1)), channel.silent_s]
    began = time.monotonic()
    found += [channel.ask(lambda _: go_on.wait(), within_s=0.2), time.monotonic() - began, channel.silent_s]
    go_on.set()
    found += [channel.ask(lambda store: store.add("tests/slow", 0) > 0, within_s=10.0), channel.silent_s]
    found += [channel.ask(_gone), channel.ask(lambda _: "not asked within 30 s")]
    channel.close()
    return found


def channel_of_the_next_world():
    """Return whether a later channel finds what an earlier one has said."""
    first, later = SideChannel(), SideChannel()
    first.ask(lambda store: store.set("why/1", "an error"))
    found = [channel.ask(lambda store: store.check(["why/1"])) for channel in (first, later)]
    first.close()
    later.close()
    return found


def threads_after_runs():
    """Watch two runs, one after the other; return whether a thread is there in each, and what is left behind it."""
    found = []
    for _ in range(2):
        comm.watch_run(hang_s=60.0, limit_s=60.0, at=lambda: "a test")
        found.append(any(each.name == "lightning_sp side channel" for each in threading.enumerate()))
        comm.end_run()
        found.append([each.name for each in threading.enumerate() if each.name == "lightning_sp side channel"])
    return found


def groups_of_others():
    """Return whether groups reach beyond the world: with groups of it alone, and with one of a store of its own."""
    channel = SideChannel()
    channel.ask(lambda store: store.check(["any"]))
    dist.new_group([0])
    found = [has_groups_of_others(channel.port)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group, _ = _c10d._new_process_group_helper(
        1,
        0,
        [0],
        dist.Backend("gloo"),
        dist.PrefixStore("others", store),
        group_name="others",
        timeout=timedelta(seconds=9),
    )
    found.append(has_groups_of_others(channel.port))
    channel.close()
    del _c10d._world.pg_map[group]
    return found


def one_compares():
    """Return, of two ranks that wait, who compares; then who does once the first of them waits no more, and why the run ends at last."""
    rank, world = dist.get_rank(), dist.get_world_size()
    channel = SideChannel()
    meeting = Meeting(channel, run=_RUN, rank=rank, world=world)
    report = Report(rank=rank, run=_RUN, number=1, state=State.WAITS)
    found = []

    def talk(number):
        for each in range(world):  # one after the other
            if each == rank:
                answer = meeting.talk(Report(rank=rank, run=_RUN, number=number, state=State.WAITS), waits=True)
                ages = None if answer.seen is None else [one.age_s < 5 for one in answer.seen]
                found.append((answer.is_asked, ages, answer.why, answer.goes_first))
            dist.barrier()

    meeting.begin(report)
    meeting.tell(report)
    dist.barrier()
    talk(2)
    talk(3)
    if rank == 0:
        meeting.step_down()
    dist.barrier()
    if rank == 1:
        found.append(meeting.talk(report, waits=True).seen is not None)
        found.append(meeting.end("first", last=[0, 1]))
    dist.barrier()
    if rank == 0:
        found.append(meeting.end("second", last=[0, 1]))
    dist.barrier()
    talk(4)
    dist.barrier()
    channel.close()
    return found


def silent_ranks(seconds):
    """Return for how long ranks are silent: rank 1 when rank 0 has just asked, later, and once it has spoken."""
    rank, world = dist.get_rank(), dist.get_world_size()
    channel = SideChannel()
    meeting = Meeting(channel, run=_RUN + 1, rank=rank, world=world)
    report = Report(rank=rank, run=_RUN + 1, number=1, state=State.WAITS)
    found = []
    meeting.begin(report)
    meeting.tell(report)
    dist.barrier()

    def look():
        if rank == 0:
            number = len(found) + 2
            seen = meeting.talk(Report(rank=0, run=_RUN + 1, number=number, state=State.WAITS), waits=True).seen
            found.append([round(each.silent_s, 1) for each in seen])
        dist.barrier()

    look()
    time.sleep(seconds)
    look()
    if rank == 1:
        meeting.tell(Report(rank=1, run=_RUN + 1, number=2))
    dist.barrier()
    look()
    if rank == 0:
        meeting.step_down()
    dist.barrier()
    channel.close()
    return found


def leaves():
    """Return what rank 1 is told when rank 0 raises, in a run of its own; and how long rank 0 has waited for it."""
    comm.watch_run(hang_s=60.0, limit_s=60.0, at=lambda: "train, step 3")
    dist.barrier()
    began, told = time.monotonic(), ""
    if dist.get_rank() == 0:
        try:
            raise ValueError("my error\nof two lines")
        except ValueError as error:
            comm.leave_run(error, is_lost=False)
    else:
        time.sleep(0.5)
        told = comm.leave_run(RuntimeError("gloo/ Connection closed by peer"), is_lost=True)
    seconds = time.monotonic() - began
    comm.end_run()
    dist.barrier()
    return told, seconds


def destroys():
    """Return what rank 0 is told when rank 1 destroys its groups in a run, and what that says of itself, once."""
    comm.watch_run(hang_s=60.0, limit_s=60.0, at=lambda: "train, step 3")
    dist.barrier()
    time.sleep(1.0)  # the channel has connected
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return [comm.destroyed_in_run(), comm.destroyed_in_run()]
    time.sleep(2.0)
    told = comm.leave_run(RuntimeError("gloo/ Connection closed by peer"), is_lost=True)
    return [told, comm.destroyed_in_run()]


def fails_behind_a_run():
    """Return what rank 0 is told where rank 1's script fails behind a run: in what all call there, and at its own end."""
    comm.watch_run(hang_s=60.0, limit_s=60.0, at=lambda: "train, step 3")
    dist.barrier()
    comm.end_run()
    dist.barrier()
    if dist.get_rank() == 1:
        try:
            raise KeyError("behind the fit")
        except KeyError as error:
            comm.tell_error_of_script(error)  # waits until rank 0 knows
            return []
    comm.watch_run(hang_s=60.0, limit_s=60.0, at=lambda: "a call of all ranks behind the run")
    time.sleep(0.5)
    told = comm.leave_run(RuntimeError("gloo/ Connection closed by peer"), is_lost=True)
    comm.end_run()
    _runs().is_failing = False  # as if it had waited in a function of torch's
    return [told, comm.why_scripts_ended()]


def waits_for_no_rank():
    """Return what a run says of a main thread that waits for something else than a rank, with the lines of the wait."""
    handler = logging.handlers.BufferingHandler(99)
    logging.getLogger("lightning_sp").addHandler(handler)
    comm.watch_run(hang_s=3.0, limit_s=60.0, at=lambda: "train, step 3")
    until = time.monotonic() + 7.0
    for _ in iter(lambda: time.monotonic() < until, False):  # as a loader's wait; looks may come late
        time.sleep(5.0)
        sum(range(100_000))
    comm.end_run()
    logging.getLogger("lightning_sp").removeHandler(handler)
    return [each.getMessage() for each in handler.buffer]


def cost_s(seconds):
    """Return the CPU-seconds of the watch's threads, where the main thread sleeps and where it computes."""
    found = []
    for act in (lambda: time.sleep(0.1), lambda: sum(range(300_000))):
        dist.barrier()
        comm.watch_run(hang_s=60.0, limit_s=60.0, at=lambda: "train, step 3")
        until = time.monotonic() + seconds
        time.sleep(0.1)
        threads = [
            each for each in threading.enumerate() if each.name.startswith(("lightning_sp hang", "lightning_sp side"))
        ]
        clocks = [time.pthread_getcpuclockid(each.ident) for each in threads]
        before = sum(map(time.clock_gettime, clocks))
        while time.monotonic() < until:
            act()
        found.append(sum(map(time.clock_gettime, clocks)) - before)
        comm.end_run()
        dist.barrier()
    return found


def _windows(run, of_windows, hang_s=0.02):
    """Return what rank 0 says behind windows of looks.

    Args:
        run: of its own.
        of_windows: of each window how many of 20 looks find rank 1 in a collective, None where it is stopped; rank 0 is in 12.
        hang_s: of which a window is five.
    """
    rank, channel, said = dist.get_rank(), SideChannel(), []
    slow = SlowRanks(channel, run=_RUN + run, rank=rank, world=dist.get_world_size(), hang_s=hang_s)
    waits = Place(collective="all_reduce", line="", stack=("a.py:1 in f",))
    reads = Place(collective="", line="", stack=("train.py:9 in read",))
    for of_rank_1 in of_windows:
        num_waits, is_stopped = of_rank_1 if rank else 20, bool(rank) and of_rank_1 is None
        for look in range(0 if is_stopped else 20):
            slow.look(waits if look < num_waits else reads)
        time.sleep(5 * hang_s + 0.01)
        dist.barrier()
        if not is_stopped:
            slow.look(waits if num_waits else reads)  # the window has ended
        channel.ask(lambda store: store.check(["any"]))  # and its counts are in the store
        dist.barrier()
        said.append("".join(slow.look(waits) for _ in range(4)) if rank == 0 else "")
        dist.barrier()
    channel.close()
    return said


def slow_in_windows():
    """Return what is said where rank 1 is slow in two windows, not in those behind them, then again."""
    return _windows(2, [0, 0, *[20] * 12, 0])


def slow_by_a_little():
    """Return what is said where rank 1 waits a little less than rank 0, in each of eight windows."""
    return _windows(3, [12] * 8)


def without_new_windows():
    """Return what is said where rank 1 waits a little less than rank 0 in one window, and has no other one: it was stopped, say."""
    return _windows(4, [12] + [None] * 7)
