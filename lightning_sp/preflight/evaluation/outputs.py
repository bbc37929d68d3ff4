"""What a predict step returns on a crop, whole and sharded: tensors, numbers and texts in any nest, compared one by one.

floating point    ||shown - wanted|| <= max(tolerance ||wanted||, 16 m), where rounding moves it by m
others            equal, but for those that rounding moves: an argmax of two that are nearly alike
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.numbers import MOVES
from lightning_sp.step.results.output_structure import Leaf, leaves_of

# Of numbers that are not floating-point ones more than this part is drawn, where two seeds give others.
_DRAWN = 1e-2
_TEXTS = (str, bytes)
_KINDS = (Tensor, np.ndarray, np.generic, str, bytes, int, float, complex)


def leaves(output: Any) -> list[Leaf]:
    """Return the tensors, arrays, numbers and texts of an output, in order: of a table, an image, its array; an iterator is exhausted."""
    output = list(output) if isinstance(output, Iterator) else output
    found = [each._replace(value=_as_array(each.value)) for each in leaves_of(output)]
    return [each._replace(value=_copied(each.value)) for each in found if isinstance(each.value, _KINDS)]


def output_differences(
    shown: Sequence[Leaf],
    wanted: Sequence[Leaf],
    again: Sequence[Leaf],
    *,
    tolerance: float,
    few: float = 0.0,
    small: float = 0.0,
    moved: Sequence[Sequence[Leaf]] = (),
    moves_floats: bool = True,
) -> list[str]:
    """Return in words what of an output is not that of one device. Pure.

    Args:
        shown: leaves of what the ranks return, sequences whole.
        wanted: of what one device does.
        again: of the same from another seed: what differs is random, and not judged.
        tolerance: of floating-point numbers, relative to the norm.
        few: of other numbers, the part of them that may differ.
        small: of each floating-point number, how much it may differ besides.
        moved: of what one device does with weights that rounding has moved: what moves with them may differ.
        moves_floats: floating-point numbers, too.
    """
    if [each.path for each in wanted] != [each.path for each in again]:
        return []
    if len(shown) != len(wanted):
        return [f"{len(shown)} tensors, numbers and texts, on one device {len(wanted)}"]
    ways, ways_wanted = ([".".join(map(str, each.path)) for each in leaves] for leaves in (shown, wanted))
    if ways != ways_wanted:
        index = next(i for i, (a, b) in enumerate(zip(ways, ways_wanted, strict=True)) if a != b)
        return [f"output {index} of {len(wanted)} as {ways[index]!r}, on one device {ways_wanted[index]!r}"]
    found = []
    for index, (own, one, other) in enumerate(zip(shown, wanted, again, strict=True)):
        by_rounding = [each[index].value for each in moved if len(each) == len(wanted)]
        allowed = max(_moves(one.value, by_rounding if moves_floats else []), small)
        how = _difference(own.value, one.value, tolerance, few, [other.value, *by_rounding], allowed)
        if how is not None and _difference(one.value, other.value, tolerance, _DRAWN) is None:
            found.append(f"output {index} of {len(wanted)}{_shape_of(one.value)}: {how}")
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


def _moves(one: Any, moved: Sequence[Any]) -> float:
    """Return how far each floating-point number of an output may be moved by rounding, of what it has moved; 0 of others."""
    if isinstance(one, _TEXTS) or not isinstance(wanted := _numbers(one), Tensor) or not wanted.is_floating_point():
        return 0.0
    found = [each for each in map(_numbers, moved) if isinstance(each, Tensor) and each.shape == wanted.shape]
    return max((MOVES * _root_mean_square(each - wanted) for each in found), default=0.0)


def _root_mean_square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values.nan_to_num().double())) / math.sqrt(max(1, values.numel()))


def _difference(
    a: Any, b: Any, tolerance: float, few: float, others: Sequence[Any] = (), allowed: float = 0.0
) -> str | None:
    """Return how far an output is from another; None where they agree.

    Args:
        a: one.
        b: the other.
        tolerance: of floating-point numbers.
        few: the part of other numbers that may differ.
        others: what else one device gives: what is another number there may differ.
        allowed: of each floating-point number, whatever its size.
    """
    if isinstance(a, _TEXTS) or isinstance(b, _TEXTS):
        return None if a == b else f"{str(a)[:40]!r} is on one device {str(b)[:40]!r}"
    a, b = _numbers(a), _numbers(b)
    if isinstance(a, list) or isinstance(b, list):
        return None if a == b else "texts of it differ"
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)}, on one device {tuple(b.shape)}"
    if not (a.is_floating_point() or a.is_complex()):
        differ = a != b
        for other in map(_numbers, others):
            if isinstance(other, Tensor) and other.shape == b.shape:
                differ = differ & (other == b)
        count = int(differ.sum())
        return None if count <= few * differ.numel() else f"{count} of its {differ.numel()} elements differ"
    norm = float(torch.linalg.vector_norm(b.nan_to_num().double()))
    error = float(torch.linalg.vector_norm((a.nan_to_num() - b.nan_to_num()).double()))
    return (
        None
        if error <= max(tolerance * norm, allowed * math.sqrt(a.numel()))
        else f"differs by {error / max(norm, 1e-300):.1e} of its norm"
    )


def _numbers(value: Any) -> Any:
    """Return a value as a tensor; an array of texts as a list."""
    is_of_others = isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind not in "biufc"
    return value.tolist() if is_of_others else torch.as_tensor(value)


def _as_array(value: Any) -> Any:
    """Return a table of a library's, or an image, as an array."""
    has_array = hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    return np.asarray(value) if has_array and not isinstance(value, _KINDS) else value


def _shape_of(leaf: Any) -> str:
    return f" {tuple(leaf.shape)}" if isinstance(leaf, (Tensor, np.ndarray)) else ""


def _copied(leaf: Any) -> Any:
    """Return what a later run cannot write to."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
