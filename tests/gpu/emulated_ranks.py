"""All ranks of a ulysses x ring mesh in one process and on one device: one thread a rank, the production operators, messages by queue.

Everything that computes, packs, plans, merges or indexes is the production code, called through `attention_op` and
`attention_backward_op`; only the transport is replaced: what a rank sends is put into the receiver's queue as it is. Threads of one process
share a CUDA device's default stream, so a message is complete before its receiver's kernels run.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.attention import AttentionMask, operator
from lightning_sp.attention.fakes import Outputs
from lightning_sp.attention.kernels.kernel import Kernel
from lightning_sp.attention.schemes import network as network_hops
from lightning_sp.attention.schemes import ulysses
from lightning_sp.attention.spec.codec import AttentionSpec, encode
from lightning_sp.attention.spec.scores import Scores
from lightning_sp.config import AttentionOptions
from lightning_sp.layout import SequenceLayout, merge, shard

TIMEOUT_S = 60.0


@dataclass
class EmulatedWorld:
    """The queues between all pairs of ranks, and the groups by name."""

    layout: SequenceLayout
    queues: dict[tuple[str, int, int], queue.Queue[Tensor]] = field(default_factory=lambda: defaultdict(queue.Queue))
    lock: threading.Lock = field(default_factory=threading.Lock)
    messages: int = 0
    exchanges: Counter[tuple[str, int]] = field(default_factory=Counter)

    def name(self, axis: str, rank: int) -> str:
        """Return a rank's group on an axis; empty for an axis of size 1, as in production."""
        size = self.layout.ring_size if axis == "ring" else self.layout.ulysses_size
        return f"{axis} {rank}" if size > 1 else ""

    def group(self, name: str) -> EmulatedGroup | None:
        """Return the group that `name` names."""
        if not name:
            return None
        axis, rank = name.split()
        ring_rank, ulysses_rank = self.layout.coordinates(int(rank))
        if axis == "ring":
            return EmulatedGroup(self, f"ring {ulysses_rank}", self.layout.ring_size, ring_rank)
        return EmulatedGroup(self, f"ulysses {ring_rank}", self.layout.ulysses_size, ulysses_rank)

    def between(self, group: str, source: int, target: int) -> queue.Queue[Tensor]:
        """Return the queue of one direction between two ranks of a group."""
        with self.lock:
            return self.queues[group, source, target]


@dataclass(frozen=True)
class EmulatedGroup:
    """One rank's view of its peers on an axis: what a process group is in production."""

    world: EmulatedWorld
    name: str
    size: int
    rank: int

    def put(self, tensor: Tensor, target: int) -> None:
        """Send a tensor to a peer, as it is."""
        self.world.between(self.name, self.rank, target).put(tensor)
        with self.world.lock:
            self.world.messages += 1

    def next_exchange(self) -> int:
        """Return the number of this rank's next exchange with its peers."""
        with self.world.lock:
            self.world.exchanges[self.name, self.rank] += 1
            return self.world.exchanges[self.name, self.rank]

    def get(self, source: int) -> Tensor:
        """Return the next tensor of a peer."""
        return self.world.between(self.name, source, self.rank).get(timeout=TIMEOUT_S)


class EmulatedTransfer:
    """`comm.Transfer` over queues."""

    def __init__(self, sent: Tensor, to: int, received: Tensor, source: int, group: EmulatedGroup, turn: int) -> None:
        self._received, self._source, self._group = received, source, group
        self.in_flight = True
        if sent.numel():
            group.put(sent, to)

    def wait(self) -> Tensor:
        """Return the received buffer, complete."""
        if self._received.numel():
            self._received.copy_(self._group.get(self._source))
        self.in_flight = False
        return self._received

    def release(self) -> None:
        """Say that the received buffer was used: nothing to do, it is this rank's own."""


class EmulatedExchange:
    """`comm.collectives.Exchange` over queues."""

    def __init__(
        self,
        buffer: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        group: EmulatedGroup,
        output: Tensor | None = None,
    ) -> None:
        # Two may be under way, and be waited for in another order than they began.
        group = replace(group, name=f"{group.name}, exchange {group.next_exchange()}")
        self._received, self._group, self._output = list(received), group, output
        for target, piece in enumerate(buffer.split_with_sizes(list(sent))):
            group.put(piece, target)

    def wait(self) -> Tensor:
        """Return the received buffer, complete."""
        pieces = [self._group.get(source) for source in range(self._group.size)]
        assert [piece.numel() for piece in pieces] == self._received
        return torch.cat(pieces) if self._output is None else torch.cat(pieces, out=self._output)


@contextlib.contextmanager
def emulated_transport(world: EmulatedWorld, kernel: Kernel | None) -> Iterator[None]:
    """Replace the transport, and the local kernel where one is given."""
    replaced: list[tuple[object, str, Callable[..., object]]] = [
        (comm, "group_by_name", world.group),
        (comm, "size_of", lambda group: 1 if group is None else group.size),
        (comm, "rank_in", lambda group: 0 if group is None else group.rank),
        (ulysses, "Exchange", EmulatedExchange),
        (ulysses, "exchange", lambda *given: EmulatedExchange(*given).wait()),
        (network_hops, "Transfer", EmulatedTransfer),
        (network_hops, "next_pass", lambda group: 0),
    ]
    if kernel is not None:
        replaced.append((operator, "select_kernel", lambda *_: kernel))
    with contextlib.ExitStack() as stack:
        for owner, name, function in replaced:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def emulate(
    whole: Sequence[Tensor],
    *,
    ulysses_size: int,
    ring_size: int,
    mask: AttentionMask,
    kernel: str = "auto",
    local_kernel: Kernel | None = None,
    method: str = "hops",
    stages: int = 1,
) -> tuple[list[Tensor], int]:
    """Return whole (out, dq, dk, dv) as the ranks of a mesh compute them, and the number of messages between them.

    Args:
        whole: q, k, v and the gradient of out, (B, H or K, S, D); S a multiple of what the degrees need.
        ulysses_size: Ulysses ranks.
        ring_size: ring ranks.
        mask: what a query may see.
        kernel: the option of that name.
        local_kernel: a kernel object instead of the one that the option selects.
        method: the option `ring_method`.
        stages: the option `ulysses_stages`.
    """
    layout = SequenceLayout(ring_size, ulysses_size)
    world = EmulatedWorld(layout)
    scale = whole[0].shape[-1] ** -0.5

    def rank_step(rank: int) -> list[Tensor]:
        q, k, v, grad = (shard(t, layout, rank, dim=2) for t in whole)
        code = encode(
            AttentionSpec(
                mask=mask,
                layout_table=layout.table,
                scores=Scores(),
                sinks=None,
                scale=scale,
                options=AttentionOptions(
                    kernel=kernel, ring_transport="network", ring_method=method, ulysses_stages=stages
                ),
                ring_group=world.name("ring", rank),
                ulysses_group=world.name("ulysses", rank),
            )
        )
        made = Outputs(*operator.attention_op(q, k, v, *code))
        saved = [made.exchanged] if ulysses_size > 1 else [q, k, v]
        heads = [q.shape[1], k.shape[1]]
        gradients, _ = operator.attention_backward_op(
            grad, saved, made.saved_kv, made.visible, made.out, made.lse, *heads, False, *code
        )
        return [made.out, *operator.gradients_home(gradients, *heads, world.name("ulysses", rank), stages)]

    with emulated_transport(world, local_kernel), ThreadPoolExecutor(layout.size) as threads, torch.no_grad():
        futures = [threads.submit(rank_step, rank) for rank in range(layout.size)]
        ranks = [future.result(TIMEOUT_S) for future in futures]
    return [merge([rank[i] for rank in ranks], layout, dim=2) for i in range(4)], world.messages
