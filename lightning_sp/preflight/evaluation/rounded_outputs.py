"""What a step returns and keeps, compared but for what rounding makes: an argmax of two that are nearly alike, a LayerNorm's mean of 0.

One device's own runs, with weights that are moved by a rounding of theirs, show what that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.preflight.comparison import has_16_bit_weights
from lightning_sp.preflight.evaluation.outputs import output_differences
from lightning_sp.preflight.explain.verdict import TOLERANCES
from lightning_sp.step.results.output_structure import Leaf

# So many of an output's whole numbers may follow rounding, and floating-point ones that differ by so little, of so many runs.
_FEW, _SMALL, _RUNS = 0.1, 1e-3, 8


def unlike(module: nn.Module, shown: list[Leaf], wanted: list[Leaf], again: list[Leaf]) -> Callable[..., str]:
    """Return what says in words what of an output is not one device's, and takes what else is told of it: as of `output_differences`."""
    in_16_bits = has_16_bit_weights(module)
    tolerance = TOLERANCES[torch.bfloat16 if in_16_bits else torch.float32]

    def words(*, small: float = 0.0, **told: object) -> str:
        # In 16 bits moved weights move numbers too far to tell.
        told["small"], told["moves_floats"] = 0.0 if in_16_bits else small, not in_16_bits
        return "; ".join(output_differences(shown, wanted, again, tolerance=tolerance, **told))  # type: ignore[arg-type]

    return words


def but_for_rounding(
    differ: Sequence[Callable[..., str]], moved: Callable[[int], Sequence[list[Leaf]]], group: ProcessGroup | None
) -> list[str]:
    """Return what of each output is not one device's, in words, but for what rounding moves. Every rank must call it.

    What agrees so on a part may be the part's own where it is no rounding: an attribute is undecided then, and what is returned is to be alike
    on all ranks in each batch.

    Args:
        differ: for each output, what says so.
        moved: gives these outputs of one device's own run with weights moved by a seed.
        group: the world, on a backend for host objects.
    """
    found, runs = [each() for each in differ], list[Sequence[list[Leaf]]]()
    may_be = not any(each(few=_FEW, small=_SMALL) for each in differ)
    of_ranks = comm.gather_objects((any(found), may_be), group)
    while any(some for some, _ in of_ranks) and all(may for _, may in of_ranks) and len(runs) < _RUNS:
        runs.append(moved(len(runs)))
        found = [each(moved=others) for each, others in zip(differ, zip(*runs, strict=True), strict=True)]
        of_ranks = comm.gather_objects((any(found), may_be), group)
    return found
