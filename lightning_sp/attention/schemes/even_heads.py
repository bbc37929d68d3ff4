"""One view of the heads of all Ulysses ranks, where each rank has as many: then a copy moves them all, where uneven ones take one a rank.

8 query heads over 4 ranks      first 0, width 2, step 2, each rank others
2 key-value heads of them       first 0, width 1, step 1, two ranks share each
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from torch import Tensor

from lightning_sp.attention.plan.intervals import Range
from lightning_sp.attention.schemes.head_split import length


@dataclass(frozen=True, kw_only=True)
class EvenHeads:
    """Heads of all ranks in equal steps, so that one view of a tensor has them all, rank by rank.

    Args:
        first: head of rank 0.
        width: heads of a rank.
        step: from the heads of one rank to those of the next that has others.
        sharing: ranks, one after the other, that have the same heads.
        num_ranks: of all.
    """

    first: int
    width: int
    step: int
    sharing: int
    num_ranks: int

    def rank_major(self, tensor: Tensor) -> Tensor:
        """Return a view of the heads of each rank, those that share some once. Shapes: (B, H, s, D) -> (U / sharing, s, B, width, D)."""
        end = self.first + (self.num_ranks // self.sharing - 1) * self.step + self.width
        return tensor[:, self.first : end].unfold(1, self.width, self.step).permute(1, 2, 0, 4, 3)

    def shared(self, of_ranks: Tensor) -> Tensor:
        """Return what each rank has, by those who share it. Shapes: (U, ...) -> (U / sharing, sharing, ...)."""
        return of_ranks.view(self.num_ranks // self.sharing, self.sharing, *of_ranks.shape[1:])


@lru_cache(maxsize=4096)
def even_heads(ranges: tuple[Range, ...]) -> EvenHeads | None:
    """Return the heads of all ranks as equal steps; None where one has more of them, or other steps, than another."""
    starts = [start for start, _ in ranges]
    first, *others = widths = [length(each) for each in ranges]
    distinct = sorted(set(starts))
    sharing = len(starts) // len(distinct)
    steps = {after - before for before, after in pairwise(distinct)} or {max(first, 1)}
    if (
        any(width != first for width in others)
        or len(steps) > 1
        or starts != [each for each in distinct for _ in range(sharing)]
    ):
        return None
    return EvenHeads(first=distinct[0], width=first, step=steps.pop(), sharing=sharing, num_ranks=len(widths))
