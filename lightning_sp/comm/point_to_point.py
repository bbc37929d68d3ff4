"""Messages from one rank to another, and the tags that keep them apart."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# gloo matches messages between two ranks by tag. One of its own for `direct.AllPairs`, for a ring's hops may be in flight on the same group;
# above it the turns of the rings, so that what a pass that was given up has left is never taken for the next one's.
ALL_PAIRS_TAG, _FIRST_TURN_TAG = 1, 2


_turns: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


def next_turn(group: ProcessGroup) -> int:
    """Return the number of a group's next pass of `Transfer`s, by which their messages are told from those of other passes."""
    _turns[group] = _turns.get(group, 0) + 1
    return _turns[group] % 2**30


def turns_begun(group: ProcessGroup | None) -> int:
    """Return how many turns this rank has begun on a group."""
    return 0 if group is None else _turns.get(group, 0)


class Transfer:
    """A point-to-point hop in flight: one send and one receive, either of which may be empty.

    A class because a transfer has a lifetime: the sent buffer must live, and the received one is valid only after `wait`.

    Args:
        sent: what goes to the rank `to`.
        received: where the message of the rank `source` lands.
        group: the ranks.
        turn: as given by `next_turn`, the same on all ranks. NCCL does not look at it: there messages match by their order alone.
    """

    def __init__(self, sent: Tensor, to: int, received: Tensor, source: int, group: ProcessGroup, turn: int) -> None:
        self._sent, self._received = sent, received
        tag, operations = _FIRST_TURN_TAG + turn, []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=to, tag=tag))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=source, tag=tag))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor:
        """Return the received buffer, complete."""
        while self._works:
            self._works.pop().wait()  # each once: waiting for the same one twice never ends
        return self._received

    @property
    def in_flight(self) -> bool:
        """Whether something of it was not waited for."""
        return bool(self._works)

    def release(self) -> None:
        """Say that the received buffer was used: nothing to do, it is this rank's own."""
