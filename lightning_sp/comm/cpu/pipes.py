"""Signals of four bytes between processes of one machine, through pipes: a write for the one, a wait in the kernel for the other, and no thread.

Every rank makes a pipe for each other rank of its group; that rank opens its writing end through /proc/<pid>/fd. The pipe's reader has no
writing end itself, so that the end of the other process, however it comes, is the end of the pipe. A gloo message of one byte says the
same for a hundred times the CPU time: three of its own messages, each of which wakes a thread.
"""

from __future__ import annotations

import os
import select
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from enum import IntEnum


class Signal(IntEnum):
    """What a signal says."""

    READY = 1  # the sender's keys and values may be read
    DONE = 2  # the sender has used the receiver's
    HOME = 3  # the sender has written gradients of the receiver's
    ADDED = 4  # the sender has added those


# A signal is one number: what it says, and above it the turn, so that what a turn that was given up has left is never taken for another's.
_SIGNAL = struct.Struct("=I")
_TURNS = 2**28


class Signals:
    """The pipes of one rank. A class because it holds what has come and was not yet waited for.

    Args:
        rank: this rank.
        readers: for each other rank, the descriptor at which its signals come.
        writers: for each other rank, the descriptor of its pipe for this rank's signals.
        timeout_s: gives the limit of a wait, which changes when the first step begins.
    """

    def __init__(
        self, rank: int, readers: Mapping[int, int], writers: Mapping[int, int], timeout_s: Callable[[], float]
    ) -> None:
        self._rank, self._readers, self._writers, self._timeout_s = rank, readers, writers, timeout_s
        self._come: dict[int, Counter[int]] = {source: Counter() for source in readers}

    def send(self, signal: Signal, to: int, turn: int) -> None:
        """Tell a rank something; what this rank wrote before is then there for it."""
        try:
            os.write(self._writers[to], _SIGNAL.pack(_number(signal, turn)))
        except BrokenPipeError as error:
            raise self._ended(signal, to) from error

    def wait(self, signal: Signal, source: int, turn: int) -> None:
        """Return when a rank has sent a signal in a turn.

        Raises:
            RuntimeError: the rank's process has ended, or sends nothing within the time limit.
        """
        come, expected = self._come[source], _number(signal, turn)
        while not come[expected]:
            reader = self._readers[source]
            waiting = select.poll()
            waiting.register(reader, select.POLLIN)
            limit_s = self._timeout_s()
            if not waiting.poll(limit_s * 1000):
                raise RuntimeError(
                    f"rank {self._rank} of the ring waited {limit_s:g} s for rank {source}'s signal {signal.name}"
                )
            found = os.read(reader, 4096)
            if not found:
                raise self._ended(signal, source)
            # Whole ones: a pipe takes and gives so few bytes at once or not at all.
            come.update(number for (number,) in _SIGNAL.iter_unpack(found))
        come[expected] -= 1
        if not come[expected]:
            del come[expected]

    def forget(self, turn: int) -> None:
        """Drop what came in the turns before one: of passes that were given up, or it would pile up."""
        for come in self._come.values():
            for number in [number for number in come if 0 < (turn - number // 8) % _TURNS < _TURNS // 2]:
                del come[number]

    def _ended(self, signal: Signal, peer: int) -> RuntimeError:
        return RuntimeError(f"rank {peer} of the ring has ended; rank {self._rank} was at the signal {signal.name}")


def _number(signal: Signal, turn: int) -> int:
    return signal + 8 * (turn % _TURNS)
