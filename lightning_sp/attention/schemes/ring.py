"""Ring attention: keys and values come to the queries, hop by hop, while the previous block is computed.

In hop i every rank receives straight from the rank i before it only the keys that its mask needs, and sends likewise; nothing is passed
through, so nothing stale can be used and zigzag's unneeded halves never travel. The backward repeats the hops and sends each partial
(dk, dv) straight home.

    rank r:   own block | block of r-1 | block of r-2 | ...
                hop 1 ->|   hop 2   -> |                      hop i+1 is in flight while block i is computed

Communicates, sent by ring rank r of R, in units of its local K (or V, of equal size), for one document:

    causal:  forward R-1 + r (K and V: both chunks to the r earlier ranks, the early chunk alone to the R-1-r later ones),
             backward that again, and dK, dV home 2(R-1) - r; together 4(R-1) + r, on average over r 4.5(R-1)
    full:    forward 2(R-1), backward 4(R-1)

Where what arrived in the forward is saved for the backward (`ring_saves_kv`) no keys travel again: causal 3(R-1), full 4(R-1), for up to R-1
local K and V more in memory for each layer.
Query heads may come in parts, the stages of Ulysses (`stages`): in each hop one after the other, so that keys travel once for all of them.
Windows, chunks and packed documents send less: only the ranges of keys that some query of the receiver may see.
Source: Ring Attention, arXiv:2310.01889; zigzag as in zhuzilin/ring-flash-attention; direct hops are this project's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp.attention.plan.blocks import AllGatherPlan, Block, Plan
from lightning_sp.attention.plan.intervals import Range
from lightning_sp.attention.schemes.query_heads import QueryHeads, SavedHeads, backward_of_parts
from lightning_sp.attention.schemes.select_transport import transports_for
from lightning_sp.attention.schemes.transport import (
    Arriving,
    HomewardGradients,
    Transport,
    abandon_on_error,
    num_tokens,
    pack,
    unpack,
)
from lightning_sp.attention.spec.accumulator import accumulator_dtype
from lightning_sp.attention.spec.positions import ScorePositions, global_positions
from lightning_sp.config import AttentionOptions

_Part = TypeVar("_Part")


@dataclass(frozen=True)
class Ring:
    """One rank's view of the ring for one sequence: who holds what, what travels, and by what."""

    plan: Plan
    rank: int
    group: ProcessGroup | None
    heads: Range | None = None  # query heads of this rank, where the kernel is to know where a score lies
    options: AttentionOptions = field(default_factory=AttentionOptions)

    @property
    def size(self) -> int:
        """Return the ranks of the ring."""
        return self.plan.layout.ring_size

    @property
    def own(self) -> tuple[Block, ...]:
        """Return the blocks of this rank's queries against its own keys."""
        return self.plan.blocks(self.rank, self.rank)

    def source(self, hop: int) -> int:
        """Return the rank whose keys arrive in a hop."""
        return (self.rank - hop) % self.size

    def target(self, hop: int) -> int:
        """Return the rank to which this rank's keys go in a hop."""
        return (self.rank + hop) % self.size

    def positions(self, k: Tensor, hop: int) -> ScorePositions | None:
        """Return where the scores of a hop lie, of all query heads of this rank, keys numbered as they arrive.

        None where the kernel does not ask. `k`: local keys, for their rows and device.
        """
        if self.heads is None:
            return None
        layout, source = self.plan.layout, self.source(hop)
        queries = global_positions(layout.ring_chunks(self.plan.length, self.rank), k.device)
        arriving = self.arriving(hop)[0] if hop else None
        length = self.plan.key_length
        keys = global_positions(layout.for_length(length).ring_chunks(length, source), k.device, arriving)
        return ScorePositions((0, k.shape[0]), self.heads, queries, keys)

    def arriving(self, hop: int) -> tuple[tuple[Range, ...], tuple[Block, ...]]:
        """Return the ranges of the source's keys that arrive in a hop, and the blocks on them as they lie then."""
        return self.plan.arriving(self.rank, self.source(hop))

    def leaving(self, hop: int) -> tuple[Range, ...]:
        """Return the ranges of this rank's keys that the target needs in a hop."""
        return self.plan.arriving(self.target(hop), self.rank)[0]

    def needed(self, hop: int) -> tuple[Range, ...]:
        """Return the ranges of the source's keys that this rank needs in a hop."""
        return self.plan.arriving(self.rank, self.source(hop))[0]

    @property
    def all_gather(self) -> AllGatherPlan:
        """Return the blocks of this rank's queries against all keys that they see, in the order of their positions."""
        return self.plan.all_gather(self.rank)

    def begin_forward(self, k: Tensor, v: Tensor, saved_kv: Tensor | None = None) -> Transport:
        """Begin a pass: this rank's keys and values are ready for the others. Shapes: see `Transport.begin_forward`."""
        name = self.options.effective_ring_transport
        required = name != "auto"
        for transport in transports_for(name):
            if (begun := transport.begin_forward(self, k, v, saved_kv, required=required)) is not None:
                return begun
        raise AssertionError(f"no transport {name!r} for this ring")

    def begin_backward(self, k: Tensor, v: Tensor, saved_kv: Tensor | None = None) -> Transport:
        """Begin a backward pass, for which what has arrived in the forward may have been saved."""
        name = self.options.effective_ring_transport
        required = name != "auto"
        for transport in transports_for(name):
            if (begun := transport.begin_backward(self, k, v, saved_kv, required=required)) is not None:
                return begun
        raise AssertionError(f"no transport {name!r} for this ring")

    def saved_range(self, hop: int) -> Range:
        """Return where a hop's keys lie among those that are saved, with room for all."""
        first = sum(num_tokens(self.needed(earlier)) for earlier in range(1, hop))
        return first, first + num_tokens(self.needed(hop))


def ring_forward(
    ring: Ring,
    kv: tuple[Tensor, Tensor],
    queries: Iterable[QueryHeads],
    finish: Callable[[Tensor, Tensor], None],
    saved_kv: Tensor | None = None,
) -> None:
    """Attend from the local queries to the keys of all ring ranks, and the sinks.

    Args:
        ring: who holds what.
        kv: local keys and values, (B, K, S, D) twice; S = this ring rank's tokens.
        queries: parts of the query heads, taken one by one as each is computed for the first time.
        finish: called with each part's out, (B, h, S, D), and lse, (B, h, S), in their order, as it is complete.
        saved_kv: where arriving keys stay for the backward, ((R-1) S, 2, B, K, D).
    """
    size = ring.size
    hops = ring.begin_forward(*kv, saved_kv) if size > 1 else None
    parts: list[QueryHeads] = []
    running: deque[tuple[Tensor, Tensor]] = deque()  # of the parts, in their order
    transfer: Arriving | None = None
    with abandon_on_error(hops):
        for hop in range(size):
            following = hops.start_keys(hop + 1) if hops is not None and hop + 1 < size else None
            blocks = ring.arriving(hop)[1] if hop else ring.own
            keys = unpack(transfer.wait()) if transfer is not None else kv
            positions = ring.positions(kv[0], hop)
            for part in parts if hop else _noted(queries, parts):
                partial = part.forward(blocks, keys, running.popleft() if hop else None, positions)
                if hop + 1 < size:
                    running.append(partial)
                else:
                    finish(*part.finished(partial))
                del partial
            if transfer is not None:
                transfer.release()
            transfer = following


def ring_backward(
    ring: Ring, kv: tuple[Tensor, Tensor], queries: Iterable[SavedHeads], saved_kv: Tensor | None = None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return (dq of each part, dk, dv) of the local tokens, from the global (out, lse) of the local queries.

    Shapes: as in `ring_forward`.
    """
    size, dq, dtype = ring.size, list[Tensor](), kv[0].dtype
    if size == 1:
        dk, dv = backward_of_parts(queries, ring.own, kv, dq, ring.positions(kv[0], 0))
        return [each.to(dtype) for each in dq], dk, dv
    hops = ring.begin_backward(*kv, saved_kv)
    with abandon_on_error(hops):
        transfer: Arriving | None = hops.start_keys(1)
        parts: list[SavedHeads] = []
        dk, dv = backward_of_parts(_noted(queries, parts), ring.own, kv, dq, ring.positions(kv[0], 0))
        home = HomewardGradients(ring, hops, pack(dk, dv).to(accumulator_dtype(dtype)))
        del dk, dv  # what is dead goes before the next buffer comes: the peak of a ring is its buffers
        for hop in range(1, size):
            assert transfer is not None
            arrived = transfer
            received = arrived.wait()
            transfer = hops.start_keys(hop + 1) if hop + 1 < size else None
            blocks, gradients = ring.arriving(hop)[1], None
            if blocks:
                gradients = backward_of_parts(parts, blocks, unpack(received), dq, ring.positions(kv[0], hop))
            arrived.release()
            del arrived, received
            home.send(hop, gradients)
            del gradients
        dk, dv = home.finish()
    return [each.to(dtype) for each in dq], dk.to(dtype), dv.to(dtype)


def _noted(queries: Iterable[_Part], parts: list[_Part]) -> Iterator[_Part]:
    """Yield each part as it comes, and note it for the hops that follow."""
    for part in queries:
        parts.append(part)
        yield part
