"""Numbers of weights and buffers that a step reads, and may decide by: noted in a trial, and shown as if they were small, or large.

    if self.scale.item() < 0.5: x = x + x.cumsum(1)       no trial of the first steps sees this line, where the scale begins at 1
    x = torch.where(self.scale < 0.5, x.cumsum(1), x)     nor what it gives

What is made of these alone is followed, not what is made of tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_sp.global_view.table import name_of
from lightning_sp.preflight.recording.hidden_terms import users_place
from lightning_sp.preflight.recording.numbers_read.forced_numbers import tracked_number
from lightning_sp.preflight.recording.numbers_read.read_numbers import COMPARISONS
from lightning_sp.preflight.recording.users_lines import INSTALLED

_TRUTHS, _NUMBERS = {"__bool__", "is_nonzero"}, {"item", "__float__"}
# What Python's `float` gets, which keeps no trace of where a number comes from.
_TIMES = 1e3


class ReadWeights(TorchFunctionMode):
    """Notes the user's lines that read numbers of weights.

    Args:
        module: whose buffers count as its weights do.
        larger: whether these come out as if they were large, or small; None as they are.

    Attributes:
        lines: by file and line.
    """

    def __init__(self, module: nn.Module, *, larger: bool | None = None) -> None:
        super().__init__()
        self.lines: set[str] = set()
        self._larger = larger
        self._made = WeakTensorKeyDictionary()
        # Of what is in it and of what was: a first look that costs less.
        self._ids: set[int] = set()
        for each in module.buffers():
            self._note(each)

    def _note(self, tensor: Tensor) -> None:
        self._made[tensor] = True
        self._ids.add(id(tensor))

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        first = args[0] if args else None
        if type(first) is Tensor and id(first) not in self._ids:
            return output  # most of a step's: of a weight's numbers each call pays for this
        flat = [part for each in args for part in (each if isinstance(each, (list, tuple)) else [each])]
        given = [each for each in flat if isinstance(each, Tensor)]
        if not given or not all(isinstance(each, nn.Parameter) or each in self._made for each in given):
            return output
        name = name_of(function)
        if isinstance(output, Tensor):
            self._note(output)
            if output.numel() != 1 or name not in COMPARISONS:
                return output
        elif name not in _TRUTHS | _NUMBERS:
            return output
        place = users_place(sys._getframe(1))
        if place is None or any(folder in place[0] for folder in INSTALLED):
            return output
        self.lines.add(f"{place[0]}:{place[1]}")
        if self._larger is None:
            return output
        if isinstance(output, Tensor):
            return torch.full_like(output, self._larger)
        return _shown(name, output, larger=self._larger)


def _shown(name: str, number: Any, *, larger: bool) -> Any:
    if name in _TRUTHS or isinstance(number, bool):
        return larger
    if not isinstance(number, float):
        return number
    if name == "item":
        return tracked_number(number, larger=larger)
    return max(abs(number), 1 / _TIMES) * _TIMES if larger else min(number * _TIMES, number / _TIMES)


@contextmanager
def weights_shown(module: nn.Module, read: ReadWeights, *, larger: bool) -> Iterator[None]:
    """Show what a step reads of weights, if it does, as if it were small, or large.

    Args:
        module: whose step it is.
        read: what it has read.
        larger: whether it is shown as large.
    """
    if not read.lines:
        yield
        return
    with ReadWeights(module, larger=larger):
        yield
