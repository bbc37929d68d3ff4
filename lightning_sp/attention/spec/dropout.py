"""Attention dropout whose mask is a hash of where a weight lies, and of nothing else: not of the rank, the degrees, the tile or the call order.

    keep(seed, call, sample, head, query, key)  iff  top 53 bits of h >= p 2^53
    h = mix(row + (key + 1) g),   row = mix(... mix(mix(seed) ^ call) ^ sample ...) over (seed, call, sample, head, query)

mix is splitmix64's finalizer and g its increment, so that each row of weights reads its own splitmix64 stream at the key's position.
Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16; counters instead of a state: Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.errors import SequenceParallelError


@dataclass(frozen=True, eq=False)
class AttentionDropout:
    """Dropout of attention weights, the same at every split of the sequence.

    Args:
        probability: that a weight is dropped; the others are divided by 1 - probability.
        seed: of the run, the same on all ranks; 64 bits, as torch takes them.
        call: which attention call of which step it is: every layer and step needs its own.
        samples: number of each row of the batch in the whole data (B,), int64; None for 0, 1, ...: right where data-parallel ranks do not
            matter.

    Raises:
        SequenceParallelError: a probability outside [0, 1), a seed or a call of more than 64 bits.
    """

    probability: float
    seed: int = 0
    call: int = 0
    samples: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability < 1.0:
            raise SequenceParallelError(f"dropout probability {self.probability}: must be at least 0 and below 1")
        for name in ("seed", "call"):
            number = getattr(self, name)
            if not -(2**63) <= number < 2**64:
                raise SequenceParallelError(f"dropout {name} {number}: must have at most 64 bits")
            # As an operator takes it.
            object.__setattr__(self, name, _signed(number))

    def keep(self, positions: ScorePositions) -> Tensor:
        """Return which weights stay, to be divided by 1 - probability. Shapes: () -> (rows, heads, Sq, Sk), bool."""
        device = positions.queries.device
        rows = torch.arange(*positions.rows, device=device)
        samples = rows if self.samples is None else self.samples.to(device)[rows]
        key = _mix(torch.tensor(_signed(self.seed), device=device))
        key = _mix(key ^ self.call)
        key = _mix(key ^ samples)
        key = _mix(key[:, None] ^ torch.arange(*positions.heads, device=device))
        key = _mix(key[..., None] ^ positions.queries)
        bits = _mix(key[..., None] + (positions.keys + 1) * _GAMMA)
        keep: Tensor = _shift(bits, 11) >= int(self.probability * 2**53)
        return keep


def _signed(number: int) -> int:
    """Return the 64-bit number as torch.int64 holds it."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Shift right as an unsigned number: int64 keeps its sign otherwise."""
    shifted: Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return shifted


def _mix(bits: Tensor) -> Tensor:
    """Spread every bit over all 64; int64 products wrap around, which is what is meant."""
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)
