"""Messages from one rank to another, and the tags that keep them apart."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp.comm.groups import wait_for

# gloo matches messages between two ranks by tag. `all_pairs` has a tag of its own, for a ring's hops may be in flight on the same group. Above
# it each pass of a ring has one, so that a message left by a pass that failed is never received by the next.
ALL_PAIRS_TAG, _FIRST_PASS_TAG = 1, 2


_num_passes: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


def next_pass(group: ProcessGroup) -> int:
    """Return the number of a group's next pass of `Transfer`s, which becomes the tag of their messages."""
    _num_passes[group] = _num_passes.get(group, 0) + 1
    return _num_passes[group] % 2**30


def num_passes(group: ProcessGroup | None) -> int:
    """Return how many passes this rank has begun on a group."""
    return 0 if group is None else _num_passes.get(group, 0)


class Transfer:
    """A point-to-point hop in flight: one send and one receive, either of which may be empty.

    It keeps the sent buffer alive, and the received one is valid only after `wait`.

    Args:
        sent: what goes to the rank `to`.
        received: where the message of the rank `source` lands.
        group: the ranks.
        pass_number: of `next_pass`, the same on all ranks. NCCL ignores it: there messages match by their order alone.
    """

    def __init__(
        self, sent: Tensor, to: int, received: Tensor, source: int, group: ProcessGroup, pass_number: int
    ) -> None:
        self._sent, self._received, self._group = sent, received, group
        tag, operations = _FIRST_PASS_TAG + pass_number, []
        if sent.numel():
            operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=to, tag=tag))
        if received.numel():
            operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=source, tag=tag))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor:
        """Return the received buffer, complete."""
        while self._works:
            wait_for(self._works.pop(), self._group)  # each once: waiting for the same one twice never ends
        return self._received

    @property
    def in_flight(self) -> bool:
        """Whether a message of it was not waited for."""
        return bool(self._works)

    def release(self) -> None:
        """Give the received buffer back: nothing to do, it is this rank's own."""
