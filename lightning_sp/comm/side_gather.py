"""A gather to rank 0, and its answer to all, between threads that run beside the ranks' steps: through the store that the ranks met in.

A collective of the steps may run at the same time. The store has a connection of its own for this, and no order of calls.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from lightning_sp.comm.groups import cached_per_world, timeout_s, when_destroyed
from lightning_sp.comm.hangs.side_channel import SideChannel

_POLL_S = 0.1
_ANSWER_S = 10.0


class _World:
    """The connection of a world, and how many gathers there were: all ranks have begun as many."""

    def __init__(self) -> None:
        self.channel, self.numbers = SideChannel(), itertools.count()


@cached_per_world
def _of_world() -> _World:
    made, world = _World(), dist.group.WORLD
    assert world is not None
    when_destroyed(world, made.channel.close)
    return made


class SideGather:
    """One gather. Every rank makes it at the same place in its steps, and gives it to a thread."""

    def __init__(self) -> None:
        self._world: _World | None = None
        self._rank, self._size, self._limit_s = 0, 1, 0.0
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._world = _of_world()
            self._rank, self._size, self._limit_s = dist.get_rank(), dist.get_world_size(), timeout_s()
            self._key = f"gather/{next(self._world.numbers)}"

    def run(self, value: Any, act: Callable[[list[Any]], str]) -> str:
        """Let rank 0 act on the values of all ranks, and return its words on all of them.

        A rank that says nothing for the time limit of a collective after the others is named in these words.

        Args:
            value: of this rank; picklable.
            act: raises nothing.

        Communicates: a value of each rank in the store, and rank 0's words.
        """
        if self._world is None:
            return act([value])
        try:
            return self._run(value, act)
        except Exception as error:  # of the store any: its host may have ended
            return f"rank {self._rank} cannot reach rank 0's store any more ({type(error).__name__}: {error})"
        finally:
            # Gathers come one after the other, and seldom: between two of them no thread is left.
            self._world.channel.close()

    def _run(self, value: Any, act: Callable[[list[Any]], str]) -> str:
        self._set(str(self._rank), pickle.dumps(value))
        if self._rank:
            # As long as rank 0 may wait for others, and then act.
            told = next((each for each in self._tries(2 * self._limit_s) if self._has("words")), None)
            return (
                f"rank 0 has said nothing for {2 * self._limit_s:g} s" if told is None else self._get("words").decode()
            )
        missing = list(range(self._size))
        for _ in self._tries(self._limit_s):
            missing = [rank for rank in missing if not self._has(str(rank))]
            if not missing:
                break
        if missing:
            words = f"ranks {missing} have not ended their part {self._limit_s:g} s after rank 0"
        else:
            words = act([pickle.loads(self._get(str(rank))) for rank in range(self._size)])
        self._set("words", words.encode())
        self._ask(self._forget)
        return words

    def _forget(self, store: Any) -> None:
        for rank in range(self._size):
            store.delete_key(f"{self._key}/{rank}")

    def _tries(self, limit_s: float) -> Iterator[int]:
        until = time.monotonic() + limit_s
        for number in itertools.count():
            yield number
            if time.monotonic() > until:
                return
            time.sleep(_POLL_S)

    def _set(self, name: str, value: bytes) -> None:
        self._ask(lambda store: store.set(f"{self._key}/{name}", value))

    def _has(self, name: str) -> bool:
        return bool(self._ask(lambda store: store.check([f"{self._key}/{name}"])))

    def _get(self, name: str) -> bytes:
        return bytes(self._ask(lambda store: store.get(f"{self._key}/{name}")))

    def _ask(self, request: Callable[[Any], Any]) -> Any:
        assert self._world is not None
        return self._world.channel.post(request).result(_ANSWER_S)
