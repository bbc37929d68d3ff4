"""What ranks say of themselves where one of them waits, whether that is a deadlock, and in which words it is told. Pure functions."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

# A rank that waits for so long, with all others, and nothing on its way between them, waits for ever.
STUCK_S = 4.0
# Ranks that are asked answer every second.
FRESH_S = 3.5
SILENT_S = 4.0
_MOST_GROUPS = 8
_RULE = (
    "Every rank takes part in every collective, in one order: call save_checkpoint, validation, self.log(..., sync_dist=True) and collectives "
    "of your own on all ranks; so the model in a hook, and what reads its weights (parameter.norm()): each gathers them, not under "
    "@rank_zero_only, where what was made is written alone; stop on all ranks or on none (broadcast what one decides), and give all ranks "
    "equally many batches"
)


class State(str, Enum):
    """What a rank does."""

    WAITS = "waits"  # in a collective, without any CPU time
    ELSEWHERE = "elsewhere"
    ENDED = "ended"  # its run has, as it should or by an error of its own
    LOST = "lost"  # its run has ended, for another rank's did


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank says of itself.

    Args:
        rank: which.
        run: the how many-th run of its world, counted by itself.
        number: counts this rank's reports.
        moves: of `MainThread`.
        at: the stage and step.
        state: what it does.
        since_s: for how long.
        collective: in which collective it waits, or was lost; empty if in none.
        line: the user's line.
        stack: its innermost lines.
        idle_s: for how long its process has done nothing at all, where it is in no collective; behind its run as another rank sees it.
        is_quiet: nothing is on its way to or from this process, and nothing was since it waits.
        process: its number; and the host and the name space by which a rank on the same host knows that number.
        why: of a rank that has left.
    """

    rank: int
    run: int
    number: int = 0
    moves: int = 0
    at: str = ""
    state: State = State.ELSEWHERE
    since_s: float = 0.0
    collective: str = ""
    line: str = ""
    stack: tuple[str, ...] = ()
    idle_s: float = 0.0
    is_quiet: bool = False
    process: tuple[int, str, str] = (0, "", "")
    why: str = ""

    def encode(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Report:
        """Return what `encode` was given."""
        values = json.loads(text)
        given = {"state": State(values["state"]), "stack": tuple(values["stack"]), "process": tuple(values["process"])}
        return cls(**{**values, **given})


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A rank's last report, as another rank has seen it.

    Args:
        rank: whose.
        report: None before the first.
        age_s: for how long no newer one has come; infinite before a second one has.
        silent_s: for how long it has been asked in vain; 0 if not.
    """

    rank: int
    report: Report | None
    age_s: float
    silent_s: float

    def is_in(self, run: int) -> bool:
        """Return whether the rank has begun a run."""
        return self.report is not None and self.report.run >= run

    @property
    def process(self) -> tuple[int, str, str]:
        """Return the rank's process; that of nobody before its first report."""
        return (0, "", "") if self.report is None else self.report.process

    @property
    def has_left(self) -> bool:
        """Return whether the rank's run has ended."""
        return self.report is not None and self.report.state in (State.ENDED, State.LOST)

    @property
    def is_stuck(self) -> bool:
        """Return whether the rank waits, and has waited for long enough, while nothing came or went."""
        own = self.report
        waits = own is not None and own.state is State.WAITS and own.since_s >= STUCK_S and own.is_quiet
        return waits and self.age_s < FRESH_S


def process_here() -> tuple[int, str, str]:
    """Return this process' number, its host, and the name space of its number."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return os.getpid(), socket.gethostname(), space


def process_state(process: tuple[int, str, str]) -> str:
    """Return the kernel's letter for a process of this host; "" for one of another, "X" for one that has ended."""
    if process[1:] != process_here()[1:] or not process[2]:
        return ""
    try:
        return Path(f"/proc/{process[0]}/stat").read_text().rpartition(")")[2].split()[0].replace("Z", "X")
    except OSError:
        return "X"


def is_deadlock(seen: Sequence[Seen], run: int) -> bool:
    """Return whether no rank can go on: all wait, or have left, and not in one and the same collective.

    Args:
        seen: all ranks.
        run: the asking rank's.
    """
    if not all(each.is_in(run) and (each.is_stuck or each.has_left) for each in seen):
        return False
    waits = {
        (each.report.run, each.report.at, each.report.collective) for each in seen if each.report and each.is_stuck
    }
    return len(waits) > 1 or (bool(waits) and any(each.has_left for each in seen))


def idle_ranks(seen: Sequence[Seen], limit_s: float) -> list[int]:
    """Return the ranks that others wait for where all of them have done nothing at all for a limit, or are stopped and silent for as long."""
    late = [each for each in seen if not _seems_to_wait(each)]
    return [each.rank for each in late] if all(_is_idle(each, limit_s) for each in late) else []


def same_waits(seen: Sequence[Seen]) -> tuple[int, ...]:
    """Return what is equal for two looks at the same waits."""
    return tuple(each.report.moves if each.report is not None else -1 for each in seen)


def told_deadlock(seen: Sequence[Seen]) -> str:
    """Return the words of a deadlock, or of a run that some ranks have ended and others have not."""
    if any(each.has_left for each in seen):
        return f"some ranks have ended the run, and the others wait for them: {told_places(seen)}. {_RULE}"
    return f"ranks wait in different collectives, and none of them can end: {told_places(seen)}. {_RULE}"


def told_late(seen: Sequence[Seen], rank: int) -> str:
    """Return where a rank waits and for which ranks, with the stack of each."""
    own = next(each for each in seen if each.rank == rank)
    late = [each for each in seen if not _seems_to_wait(each)]
    since_s = own.report.since_s if own.report is not None else 0.0
    words = f"{told_places([own])}, for {since_s:.0f} s"
    if not late:
        return (
            f"{words}, and so do all: {told_places(seen)}. If it is one collective, the network is down, or very slow"
        )
    return f"{words}, and these do not come:\n{told_stacks(late)}"


def told_stacks(seen: Sequence[Seen]) -> str:
    """Return where ranks are, with the stack of each."""
    stacks = [_stack(each) for each in seen[:_MOST_GROUPS]]
    more = f"\n... and {len(seen) - len(stacks)} more" if len(seen) > len(stacks) else ""
    return "\n".join(stacks) + more


def told_places(seen: Sequence[Seen]) -> str:
    """Return what ranks do, those that do the same together."""
    groups: dict[str, list[int]] = {}
    for each in seen:
        groups.setdefault(_what(each), []).append(each.rank)
    told = [f"{'rank' if len(ranks) == 1 else 'ranks'} {told_numbers(ranks)} {what}" for what, ranks in groups.items()]
    more = [f"{len(told) - _MOST_GROUPS} more"] if len(told) > _MOST_GROUPS else []
    return "; ".join(told[:_MOST_GROUPS] + more)


def _is_idle(seen: Seen, limit_s: float) -> bool:
    own = seen.report
    if own is None or own.state not in (State.ELSEWHERE, State.ENDED):
        return False
    # Behind its run a rank answers nobody: others have looked at its process.
    if seen.silent_s and own.state is State.ELSEWHERE:
        return seen.silent_s + SILENT_S >= limit_s and process_state(own.process) in ("T", "t")
    return own.idle_s >= limit_s


def told_idle(seen: Sequence[Seen], rank: int, limit_s: float) -> str:
    """Return for whom the ranks wait in vain at the start of a run, where a rank that works has longer."""
    return (
        f"{told_late(seen, rank)}\nThey use no CPU time, nor does a thread or process of theirs. Before its first batch a rank that works has "
        f"start_timeout_s, one that does nothing timeout_s={limit_s:g} s: call what waits for others on all ranks, or give a larger timeout_s"
    )


def _seems_to_wait(seen: Seen) -> bool:
    return seen.report is not None and seen.report.state is State.WAITS and seen.age_s < FRESH_S


def _what(seen: Seen) -> str:
    """Return what a rank does, without its number and the time, so that ranks that do the same are told together."""
    own = seen.report
    if own is None:
        return "has not begun the run"
    line = f", from {own.line}" if own.line and own.line not in own.collective else ""
    if seen.has_left:
        return f"{own.why}, at {own.at}"
    number, host, _ = own.process
    state = process_state(own.process)
    if state == "X" and own.why:
        return f"{own.why}, at {own.at}, and has gone since (process {number} on {host}): its script is over, or it was killed"
    if state == "X":
        return f"has ended without a word (process {number} on {host}): it was killed, crashed, or called os._exit"
    if state in ("T", "t"):
        return f"is stopped (process {number} on {host}: SIGSTOP, Ctrl-Z or a debugger)"
    if seen.silent_s:
        return (
            f"does not answer (process {number} on {host}): it is stopped or gone, its host is out of reach, or native code holds the lock of "
            f"its Python, which py-spy dump --native --pid {number} shows"
        )
    if own.state is State.WAITS:
        return f"waits in {own.collective}{line}, at {own.at}"
    return f"is in no collective{line.replace('from', 'but in')}, at {own.at}" if own.stack else "has not answered yet"


def _stack(seen: Seen) -> str:
    own, head = seen.report, f"rank {seen.rank} {_what(seen)}"
    if own is None or seen.has_left or not own.stack or seen.silent_s or process_state(own.process) in ("X", "T", "t"):
        return head
    since = f", for {own.since_s:.0f} s" if own.since_s >= 1 else ""
    return f"{head}{since}:" + "".join(f"\n    {line}" for line in own.stack)


def told_numbers(ranks: Sequence[int]) -> str:
    """Return numbers in rising order, runs of them as first-last."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
