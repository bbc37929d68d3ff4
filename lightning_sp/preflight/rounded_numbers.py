"""Numbers that rounding alone makes: the mean of a LayerNorm's output is 0, and each run shows another rounding of it.

One device's own number is such a one where it moves as much when its weights move by a rounding of theirs. What differs for another reason moves
by a rounding of itself there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.preflight.moved_weights import moved_weights
from lightning_sp.preflight.numbers import RankNumbers, differences
from lightning_sp.preflight.recording.logged import Number

# Runs with moved weights, and by how many roundings of a weight.
_RUNS, _ROUNDINGS = 2, 4.0


def with_moves(
    own: RankNumbers, module: nn.Module, whole: Callable[[], Mapping[str, Number]], group: ProcessGroup | None
) -> RankNumbers:
    """Return the numbers of a step with how far one device's move by rounding, where some differ. Every rank must call it.

    Args:
        own: of this rank.
        module: whose weights are moved. In 16 bits these move numbers too far to tell, and the tolerance has a floor there.
        whole: one device's run of the same crop, from the same seed.
        group: the world, on a backend for host objects.
    """
    if not differences(comm.gather_objects(own, group)) or own.in_16_bits:
        return own
    eps = max((torch.finfo(each.dtype).eps for each in module.parameters() if each.is_floating_point()), default=0.0)
    moves = dict.fromkeys(own.whole, 0.0)
    for seed in range(_RUNS):
        with moved_weights(module, seed, _ROUNDINGS * eps):
            found = whole()
        for name in moves.keys() & found.keys():
            moves[name] = max(moves[name], abs(found[name].value - own.whole[name].value))
    return replace(own, moves=moves)
