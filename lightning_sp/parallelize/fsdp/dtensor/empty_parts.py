"""Functions that fail on a rank which has nothing of a sharded tensor: the largest of no numbers. All ranks take the whole tensor for them.

self.log("largest", self.head.weight.abs().max())      two classes, four ranks: two of these have no row
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

_OF_SOME = {
    *("max", "min", "amax", "amin", "argmax", "argmin", "aminmax", "kthvalue", "mode", "median", "nanmedian"),
    *("quantile", "nanquantile", "topk", "multinomial", "_foreach_max"),
}
# By their order that of the largest or smallest number. A dim counted from the end looks like one: a small weight is made whole once more.
_NORMS = {"norm", "vector_norm", "matrix_norm", "dist", "_foreach_norm"}


def fails_on_empty_parts(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function would fail on some ranks alone, which have no number of a tensor that it is given. Equal on all ranks."""
    name = getattr(function, "__name__", "").removeprefix("linalg_")
    if name not in _OF_SOME and name not in _NORMS:  # of each function of torch, of which few are such
        return False
    given = tree_leaves([args, kwargs])
    if name not in _OF_SOME and not any(map(_is_order_of_one_number, given)):
        return False
    return any(isinstance(each, DTensor) and _leaves_a_rank_without(each) for each in given)


def _is_order_of_one_number(order: Any) -> bool:
    return isinstance(order, (int, float, str)) and (
        order in ("inf", "-inf", float("inf")) or str(order).startswith("-")
    )


def _leaves_a_rank_without(tensor: DTensor) -> bool:
    """Return whether some rank has no number of a tensor. Rows are dealt out in parts of one size, the last ranks' may be smaller or none."""
    least = list(tensor.shape)
    for num_ranks, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Shard):
            each = -(-least[placement.dim] // num_ranks)
            least[placement.dim] = max(least[placement.dim] - (num_ranks - 1) * each, 0)
    return tensor.numel() > 0 and not all(least)
