"""Scores and masks as functions of positions, in FlexAttention's form, with global positions whatever part of the sequence a rank holds.

    score_mod(score, row, head, query, key, *tensors) -> score          mask_mod(row, head, query, key) -> bool

Written for one score; torch.vmap applies it to a tile. Gradients reach the score and the tensors given (a learned table, slopes), by
`torch.func.vjp`, tile by tile. An operator takes numbers and tensors alone, so it is handed a function's number and looks it up here.

Source: FlexAttention, arXiv:2412.05496; ALiBi, arXiv:2108.12409; relative position bias: T5, arXiv:1910.10683, section 2.1.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_sp.attention.spec.block_mask import BlockTable
from lightning_sp.attention.spec.function_contents import Contents, UnknownContentsError
from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.devices import makes_host_wait
from lightning_sp.errors import SequenceParallelError

_numbers = itertools.count(1)
_registered: WeakValueDictionary[int, ScoreMod | MaskMod] = WeakValueDictionary()


class ScoreMod:
    """A function that changes each score before the softmax, and the tensors it learns by.

    A class because it has an identity: the operator knows it by its `number` for as long as it lives.

    Args:
        function: (score, row, head, query, key, *tensors) -> score, in FlexAttention's form; row of the batch, query head, global positions.
        tensors: what it reads, the same on all ranks, whole; those of floating point get their gradients: on each rank that of its part,
            as a parameter's.

    Raises:
        SequenceParallelError: the function holds a tensor that requires a gradient and was not given: its gradient would be lost.
    """

    def __init__(self, function: Callable[..., Tensor], *tensors: Tensor) -> None:
        _check_closure(function, tensors)
        self.function, self.tensors = function, tensors
        self.number = _register(self)

    def contents(self, found: Contents) -> Any:
        """Return a value by which functions that say the same are equal.

        Raises:
            UnknownContentsError: there is none.
        """
        return found.of(self.function)

    def apply(self, scores: Tensor, positions: ScorePositions, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return the scores of a tile, changed. Shapes: (rows, heads, Sq, Sk) -> the same."""
        rows, heads = _ranges(positions)
        changed: Tensor = _over_all(self.function, 1, len(tensors))(
            scores, rows, heads, positions.queries, positions.keys, *tensors
        )
        return changed.to(scores.dtype)

    def gradients(
        self, grad: Tensor, scores: Tensor, positions: ScorePositions, tensors: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the gradients of the scores and of the tensors from that of what `apply` returned.

        Shapes: grad and scores (rows, heads, Sq, Sk); None for a tensor of integers, which has no gradient.
        """
        pull: Callable[[Tensor], tuple[Tensor, ...]]

        def changed(scores: Tensor, *learned: Tensor) -> Tensor:
            given = iter(learned)
            return self.apply(scores, positions, tuple(next(given) if t.is_floating_point() else t for t in tensors))

        with _transforms_allowed():
            pull = torch.func.vjp(changed, scores, *[t for t in tensors if t.is_floating_point()])[1]
            d_scores, *d_learned = pull(grad)
        found = iter(d_learned)
        return d_scores, tuple(next(found) if t.is_floating_point() else None for t in tensors)


class MaskMod:
    """A function that says which key a query sees.

    A class because it has an identity: the operator knows it by its `number` for as long as it lives.

    Args:
        function: (row, head, query, key) -> bool, in FlexAttention's form; global positions.
        table: which blocks it is asked for, of a `BlockMask`; None for all.
    """

    def __init__(self, function: Callable[..., Tensor], table: BlockTable | None = None) -> None:
        self.function, self.table = function, table
        self.number = _register(self)

    def visible(self, positions: ScorePositions) -> Tensor:
        """Return which keys of a tile are visible. Shapes: () -> (rows or 1, heads or 1, Sq, Sk), bool."""
        if self.table is None:
            return self._answers(positions)
        asked, whole = self.table.at_positions(positions)
        if not makes_host_wait(asked) and not bool(asked.any()):
            return whole
        # The function's own tensors may end where the table does.
        return (asked & self._answers(self.table.inside(positions))) | whole

    def contents(self, found: Contents) -> Any:
        """Return a value by which masks that say the same are equal.

        Raises:
            UnknownContentsError: there is none.
        """
        table = self.table
        of_table = (
            () if table is None else (table.size, table.lengths, found.of(table.lists or (table.asked, table.whole)))
        )
        return found.of(self.function), of_table

    def _answers(self, positions: ScorePositions) -> Tensor:
        rows, heads = _ranges(positions)
        return _over_all(self.function, 0, 0)(rows, heads, positions.queries, positions.keys)


def function_by_number(number: int) -> Any:
    """Return the function of a number, None for 0.

    Raises:
        SequenceParallelError: it is gone: nobody holds it any more.
    """
    if not number:
        return None
    found = _registered.get(number)
    if found is None:
        raise SequenceParallelError(
            f"score or mask function {number} no longer exists: keep the ScoreMod or AttentionMask until the backward has run"
        )
    return found


def told_by(function: ScoreMod | MaskMod | None) -> Any:
    """Return what a function says as a value, None where that is not known."""
    try:
        return None if function is None else function.contents(Contents())
    except UnknownContentsError:
        return None


def check_unchanged(functions: Sequence[ScoreMod | MaskMod | None], told: Sequence[Any]) -> None:
    """Refuse functions that say something else than in the forward: the backward asks them again."""
    for function, before in zip(functions, told, strict=True):
        if function is not None and before is not None and told_by(function) != before:
            what = "mask_mod" if isinstance(function, MaskMod) else "score_mod"
            raise SequenceParallelError(
                f"an attention's {what} reads a number or a tensor that was changed between its forward and its backward, which asks the "
                "function again: give each call a function of its own, which reads values that stay (a new closure, functools.partial)"
            )


def _register(function: Any) -> int:
    number = next(_numbers)
    _registered[number] = function
    return number


def _ranges(positions: ScorePositions) -> tuple[Tensor, Tensor]:
    device = positions.queries.device
    return torch.arange(*positions.rows, device=device), torch.arange(*positions.heads, device=device)


def _over_all(function: Callable[..., Any], num_scores: int, num_tensors: int) -> Callable[..., Tensor]:
    """Apply a function of one score to a tile: over keys, then queries, heads, rows."""
    score, rest = (0,) * num_scores, (None,) * num_tensors
    for over in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(*score, *over, *rest))

    def apply(*arguments: Any) -> Tensor:
        with _transforms_allowed(), _GatherByIndex():
            applied: Tensor = function(*arguments)
        return applied

    return apply


def _transforms_allowed() -> AbstractContextManager[Any]:
    """Let torch.func's transforms work inside an operator that a dispatch mode calls.

    torch.compile's own check of custom operators is such a mode, and PyTorch shuts its transforms' dispatch keys out of what runs under one.
    """
    shut = torch._C._dispatch_tls_local_exclude_set()
    for name in _TRANSFORM_KEYS:
        shut = shut.remove(getattr(torch._C.DispatchKey, name))
    guard: AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), shut
    )
    return guard


_TRANSFORM_KEYS = (
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchBatched",
    "FuncTorchVmapMode",
    "FuncTorchGradWrapper",
)


class _GatherByIndex(TorchFunctionMode):
    """Makes table[head] a gather where `head` is a tensor without dims: Python would read its number, which under vmap is many.

    A class because PyTorch's function modes are. FlexAttention does likewise.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            tensor, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if all(isinstance(each, Tensor) and each.dtype == torch.int64 for each in indices):
                return torch.ops.aten.index(tensor, list(indices))
        return func(*args, **(kwargs or {}))


def _check_closure(function: Callable[..., Any], given: tuple[Tensor, ...]) -> None:
    closed_over = [value for value in inspect.getclosurevars(function).nonlocals.values() if isinstance(value, Tensor)]
    lost = [v for v in closed_over if v.requires_grad and all(v is not tensor for tensor in given)]
    if lost:
        raise SequenceParallelError(
            f"a score function holds tensors of shapes {[tuple(v.shape) for v in lost]} that require a gradient, which would be lost: take "
            "them as arguments after the key, and give them to ScoreMod(function, *tensors)"
        )
