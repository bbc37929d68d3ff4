"""Indices that are looked at before a kernel reads by them: on a GPU one that is out of range would end the process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
# Of each operator that reads by an index, where the index stands among its arguments.
_BY_INDEX = {
    _ATEN.gather.default: 2,
    _ATEN.index_select.default: 2,
    _ATEN.scatter.src: 2,
    _ATEN.scatter.value: 2,
    _ATEN.scatter_add.default: 2,
}
# A loss: its targets, and the one that it ignores, as they stand among the arguments.
_LOSSES = {_ATEN.nll_loss_forward.default: (1, 4), _ATEN.nll_loss2d_forward.default: (1, 4)}


class CheckedIndices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where an index is out of range; or notes it and goes on with one inside, so that all ranks come to the end.

    Args:
        goes_on: whether it goes on.

    Attributes:
        found: then, what was out of range.
    """

    def __init__(self, *, goes_on: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._goes_on = goes_on
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Look at an operator's index."""
        given = list(args)
        if (place := _BY_INDEX.get(func)) is not None and len(args) > place:
            given[place] = self._inside(args[place], args[0].shape[args[1]] if args[0].dim() else 1)
        elif func is _ATEN.embedding.default:
            given[1] = self._inside(args[1], args[0].shape[0])
        elif func in _LOSSES:
            place, ignored = _LOSSES[func]
            classes = args[0].shape[1 if args[0].dim() > 1 else 0]
            kept = args[place] != args[ignored]
            given[place] = torch.where(kept, self._inside(torch.where(kept, args[place], 0), classes), args[place])
        elif func is _ATEN.index.Tensor:
            sizes = args[0].shape
            given[1] = [
                each
                if each is None or each.dtype in (torch.bool, torch.uint8)
                else self._inside(each, sizes[dim], negative=True)
                for dim, each in enumerate(args[1])
            ]
        return func(*given, **(kwargs or {}))

    def _inside(self, index: Any, size: int, *, negative: bool = False) -> Any:
        if not isinstance(index, Tensor) or not index.numel() or not size:
            return index
        least, most = (int(each) for each in torch.aminmax(index.detach()))
        lowest = -size if negative else 0
        if lowest <= least and most < size:
            return index
        why = f"index {least if least < lowest else most} is out of bounds for dimension with size {size}"
        if not self._goes_on:
            raise IndexError(why)
        self.found.append(why)
        return index.clamp(lowest, size - 1)
