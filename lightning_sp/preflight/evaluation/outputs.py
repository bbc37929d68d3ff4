"""What a predict step returns on a crop, whole and sharded: tensors, numbers and texts in any nest, compared one by one.

floating point    ||shown - wanted|| <= tolerance ||wanted||
others            at most one element in a thousand differs (in 16 bits one in ten): an argmax may follow rounding
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_sp.errors import SequenceParallelError

_PART, _PART_IN_16_BITS = 1e-2, 1e-1
_KINDS = (Tensor, np.ndarray, str, int, float)


def leaves(output: Any) -> list[Any]:
    """Return the tensors, arrays, numbers and texts of an output, in order."""
    found: list[Any] = []
    apply_to_collection(output, _KINDS, lambda leaf: found.append(_copied(leaf)))
    return found


def output_differences(
    shown: Sequence[Any], wanted: Sequence[Any], again: Sequence[Any], *, tolerance: float, in_16_bits: bool
) -> list[str]:
    """Return in words what of an output is not that of one device. Pure.

    Args:
        shown: leaves of what the ranks return, sequences whole.
        wanted: of what one device does.
        again: of the same from another seed: what differs is random, and not judged.
        tolerance: of floating-point numbers, relative to the norm.
        in_16_bits: whether the weights are in those.
    """
    if len(wanted) != len(again):
        return []
    if len(shown) != len(wanted):
        return [f"{len(shown)} tensors, numbers and texts, on one device {len(wanted)}"]
    part = _PART_IN_16_BITS if in_16_bits else _PART
    found = []
    for index, (own, one, other) in enumerate(zip(shown, wanted, again, strict=True)):
        if _difference(one, other, tolerance, part) is None and (how := _difference(own, one, tolerance, part)):
            found.append(f"output {index} of {len(wanted)}{_shape_of(one)}: {how}")
    return found


def refuse_differences(of_ranks: Sequence[str], step: str) -> None:
    """Refuse a step of which a rank's output differs.

    Args:
        of_ranks: what differs on each rank, in words; empty for nothing.
        step: in words, with the crop.

    Raises:
        SequenceParallelError: one does.
    """
    if told := [f"rank {rank}: {each}" for rank, each in enumerate(of_ranks) if each]:
        raise SequenceParallelError(
            f"preflight: {step} returns other outputs than one device: {told[0]}. It makes them from its part of the tokens: return tensors of "
            "(rows, tokens, ...), which are gathered, or make them from whole ones, self.trainer.strategy.unshard(tensor); positions that the "
            "step counts begin at 0 on each rank: take them from the batch. preflight=False switches this check off"
        )


def describe_kept(of_ranks: Sequence[str], step: str) -> str:
    """Return in words that a step keeps other values than one device; empty where it does not.

    Args:
        of_ranks: what differs on each rank, in words; empty for nothing.
        step: in words, with the crop.
    """
    told = [f"rank {rank}: {each}" for rank, each in enumerate(of_ranks) if each]
    if not told:
        return ""
    return (
        f"preflight: {step} keeps other values in lists or dicts of the module than one device: {told[0]}. It makes them from its part of "
        "the tokens, and what a hook makes of them at the epoch's end is this rank's own: keep tensors of (rows, tokens, ...), which are "
        "gathered, or make them from whole ones, self.trainer.strategy.unshard(tensor)"
    )


def _difference(a: Any, b: Any, tolerance: float, part: float) -> str | None:
    """Return how far an output is from another; None where they agree."""
    if isinstance(a, str) or isinstance(b, str):
        return None if a == b else f"{str(a)[:40]!r} is on one device {str(b)[:40]!r}"
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)}, on one device {tuple(b.shape)}"
    if not (a.is_floating_point() or a.is_complex()):
        share = float((a != b).double().mean()) if a.numel() else 0.0
        return None if share <= part else f"{share:.0%} of its elements differ"
    norm = float(torch.linalg.vector_norm(b.nan_to_num().double()))
    error = float(torch.linalg.vector_norm((a.nan_to_num() - b.nan_to_num()).double()))
    return None if error <= tolerance * norm else f"differs by {error / max(norm, 1e-300):.1e} of its norm"


def _shape_of(leaf: Any) -> str:
    return f" {tuple(leaf.shape)}" if isinstance(leaf, (Tensor, np.ndarray)) else ""


def _copied(leaf: Any) -> Any:
    """Return what a later run cannot write to."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
