"""Ulysses in stages of heads: the next stage's exchange is under way while this stage is computed.

    stage 0     q, k, v ->| kernel | out ->
    stage 1               | q, k, v ->| kernel | out ->
    stage 2                           | q, k, v ->| kernel | out ->

What is sent and received at a time is a stage's; what is saved for the backward is all heads' q, k and v, each stage's part whole and one after
the other in one tensor, where it arrives. The backward gets the gradient of out likewise. dq, dk and dv go home stage by stage when all are
computed (`operator.gradients_home`): under way behind a kernel they would come on top of what was saved, which lives as long.

Communicates: what one exchange of all heads does, byte for byte. The ranks of a group begin all exchanges in one order.
Source: Untied Ulysses (UPipe), arXiv:2602.21196. There keys go round the ring once for each stage of their group; here once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from lightning_sp.attention.kernels.merge import empty_token_major
from lightning_sp.attention.kernels.out_gradient import delta_of, out_along_gradient
from lightning_sp.attention.schemes.cross_attention import lay_cross, split_cross, start_cross
from lightning_sp.attention.schemes.head_split import HeadSplit, length
from lightning_sp.attention.schemes.ulysses import (
    Ulysses,
    lay_out,
    split_qkv,
    start_out,
    start_out_grad,
    start_qkv,
)
from lightning_sp.comm.collectives import Exchange


def empty_exchanged(q: Tensor, k: Tensor, ulysses: Ulysses) -> list[Tensor]:
    """Return room for this rank's heads of q, k and v, which stays for the backward; none without Ulysses.

    Shapes: (B, H, s, D), (B, K, t, D) -> (S, B, h + 2 k, D); in cross attention (S, B, h, D) and (T, B, 2 k, D).
    """
    if ulysses.group is None:
        return []
    batch, _, tokens, dim = q.shape
    heads, width = length(ulysses.queries), ulysses.split.width(ulysses.rank)
    if k.shape[2] == tokens:
        return [q.new_empty(tokens * ulysses.size, batch, width, dim)]
    return [
        q.new_empty(tokens * ulysses.size, batch, heads, dim),
        k.new_empty(k.shape[2] * ulysses.size, batch, width - heads, dim),
    ]


def exchanged_qkv(exchanged: Sequence[Tensor], ulysses: Ulysses) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each stage's q, and the k and v that travel with it, as views.

    Shapes: as `empty_exchanged` -> (B, h, S, D), (B, k, T, D) twice.
    """
    return [
        split_cross(room[0], room[1]) if len(room) == 2 else split_qkv(room[0], stage, ulysses.rank)
        for stage, room in zip(ulysses.split.each_stage(), _rooms(exchanged, ulysses), strict=True)
    ]


def exchange_qkv(
    q: Tensor, k: Tensor, v: Tensor, ulysses: Ulysses, exchanged: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield what `exchanged_qkv` returns, each stage as it has arrived, the next one under way; without Ulysses what was given.

    Shapes: (B, H, s, D), (B, K, t, D) twice -> (B, h, S, D), (B, k, T, D) twice. Communicates: one all_to_all_single for each stage.
    """
    group, rank, rooms = ulysses.group, ulysses.rank, _rooms(exchanged, ulysses)
    if group is None:
        yield q, k, v
        return

    def start(number: int, stage: HeadSplit) -> Exchange:
        if len(exchanged) == 2:
            return start_cross(q, k, v, stage, rank, group)
        return start_qkv(q, k, v, stage, rank, group, rooms[number][0])

    arrivals = _one_ahead(start, ulysses.split.each_stage())
    for received, room, parts in zip(arrivals, rooms, exchanged_qkv(exchanged, ulysses), strict=True):
        if len(room) == 2:
            lay_cross(received, ulysses.size, room[0], room[1])
        yield parts


def exchange_out_grad(grad: Tensor, out: Tensor, ulysses: Ulysses) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each stage's gradient of out, the next one under way, and what stands for its out; without Ulysses what was given.

    Out itself does not travel again: its product with the gradient does (`kernels.out_gradient`).

    Shapes: (B, H, s, D) twice -> (B, h, S, D) twice, views of token-major memory.
    Communicates: one all_to_all_single for each stage, and before them one of a number for each token and head.
    """
    group, rank = ulysses.group, ulysses.rank
    if group is None:
        yield grad, out
        return
    batch, _, tokens, dim = grad.shape
    stages, own = ulysses.split.each_stage(), ulysses.queries
    of_heads = start_out_grad(delta_of(grad, out).unsqueeze(-1), ulysses.split, rank, group)
    arrivals = _one_ahead(lambda _, stage: start_out_grad(grad, stage, rank, group), stages)
    delta = None
    for received, stage in zip(arrivals, stages, strict=True):
        if delta is None:
            delta = of_heads.wait().view(tokens * ulysses.size, batch, length(own)).permute(1, 2, 0)
        first, end = stage.queries(rank)
        of_stage = received.view(tokens * ulysses.size, batch, end - first, dim).permute(1, 2, 0, 3)
        yield of_stage, out_along_gradient(of_stage, delta[:, first - own[0] : end - own[0]])


class OutExchange:
    """Out on its way from the ranks of the heads to those of the tokens, a stage at a time; a class because it is in flight.

    Args:
        q: this rank's queries, for shape and dtype, (B, H, s, D).
        ulysses: who exchanges heads; without a group out stays where it is.
    """

    def __init__(self, q: Tensor, ulysses: Ulysses) -> None:
        self._q, self._ulysses, self._num_sent = q, ulysses, 0
        self._stages = ulysses.split.each_stage()
        self._out = q.new_empty(0)
        self._flying: tuple[Exchange, HeadSplit] | None = None

    def send(self, out: Tensor) -> None:
        """Send the next stage's out home. Shapes: (B, h, S, D)."""
        group, number = self._ulysses.group, self._num_sent
        self._num_sent += 1
        if group is None:
            self._out = out
            return
        self._lay_arrived()
        leaving = out.permute(2, 0, 1, 3).contiguous()
        self._flying = (start_out(leaving, self._stages[number], group), self._stages[number])

    def finish(self) -> Tensor:
        """Return out of this rank's tokens, (B, H, s, D)."""
        self._lay_arrived()
        return self._out

    def _lay_arrived(self) -> None:
        if self._flying is None:
            return
        (arriving, stage), self._flying = self._flying, None
        if not self._out.numel():
            self._out = empty_token_major(self._q, self._q.dtype)
        lay_out(arriving.wait(), stage, self._out)


def whole_parts(packed: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Return memory of all heads as parts for some of them each, every part whole, one after the other.

    Shapes: (..., sum of the widths, D) -> (..., width, D) each.
    """
    *outer, _, dim = packed.shape
    pieces = packed.view(-1).split_with_sizes([math.prod(outer) * width * dim for width in widths])
    return [piece.view(*outer, width, dim) for piece, width in zip(pieces, widths, strict=True)]


def _rooms(exchanged: Sequence[Tensor], ulysses: Ulysses) -> list[tuple[Tensor, ...]]:
    """Return where each stage lies in what `empty_exchanged` made."""
    stages, rank = ulysses.split.each_stage(), ulysses.rank
    heads, kv_heads = (
        [length(of(rank)) for of in each] for each in ([s.queries for s in stages], [s.travelling for s in stages])
    )
    if len(exchanged) == 2:
        return list(
            zip(whole_parts(exchanged[0], heads), whole_parts(exchanged[1], [2 * n for n in kv_heads]), strict=True)
        )
    return [
        (part,)
        for each in exchanged
        for part in whole_parts(each, [h + 2 * k for h, k in zip(heads, kv_heads, strict=True)])
    ]


def _one_ahead(start: Callable[[int, HeadSplit], Exchange], stages: Sequence[HeadSplit]) -> Iterator[Tensor]:
    """Yield what arrives, the next exchange begun before this one is used."""
    arriving = start(0, stages[0])
    for number in range(1, len(stages) + 1):
        received = arriving.wait()
        if number < len(stages):
            arriving = start(number, stages[number])
        yield received
