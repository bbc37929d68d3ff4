"""One view of the heads of all Ulysses ranks, where each rank has as many: then a copy moves them all, where uneven ones take one a rank.

8 query heads over 4 ranks      first 0, width 2, step 2, each rank others
2 key-value heads of them       first 0, width 1, step 1, two ranks share each
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from lightning_sp.attention.plan.intervals import Range
from lightning_sp.attention.schemes.head_split import length


@dataclass(frozen=True, kw_only=True)
class EvenHeads:
    """Heads of all ranks in equal steps, so that one view of a tensor has them all, rank by rank.

    Args:
        first: of a step those before are no rank's.
        width: heads of a rank.
        step: from the heads of one rank to those of the next that has others.
        num_steps: of a tensor.
        sharing: ranks, one after the other, that have the same heads.
    """

    first: int
    width: int
    step: int
    num_steps: int
    sharing: int

    def rank_major(self, tensor: Tensor) -> Tensor:
        """Return a view of the heads of each rank, those that share some once. Shapes: (B, H, s, D) -> (U / sharing, s, B, width, D).

        A split dim and a slice of it, for a compiler knows what a write to these leaves as it was: to `unfold` it fills the rest with zeros.
        """
        batch, _, tokens, dim = tensor.shape
        steps = tensor.view(batch, self.num_steps, self.step, tokens, dim)
        return steps[:, :, self.first : self.first + self.width].permute(1, 3, 0, 2, 4)

    def shared(self, of_ranks: Tensor) -> Tensor:
        """Return what each rank has, by those who share it. Shapes: (U, ...) -> (U / sharing, sharing, ...)."""
        return of_ranks.view(self.num_steps, self.sharing, *of_ranks.shape[1:])


@lru_cache(maxsize=4096)
def even_heads(ranges: tuple[Range, ...], num_heads: int) -> EvenHeads | None:
    """Return the heads of all ranks as equal steps; None where one has more of them, or other steps, than another.

    Args:
        ranges: of each rank.
        num_heads: of all.
    """
    starts = [start for start, _ in ranges]
    width, *others = [length(each) for each in ranges]
    distinct = sorted(set(starts))
    step, rest = divmod(num_heads, len(distinct))
    first, sharing = distinct[0], len(starts) // len(distinct)
    expected = [first + step * number for number in range(len(distinct)) for _ in range(sharing)]
    if rest or starts != expected or first + width > step or any(other != width for other in others):
        return None
    return EvenHeads(first=first, width=width, step=step, num_steps=len(distinct), sharing=sharing)
