"""Numbers that are alike on all ranks, which a step reads and may decide by: of weights, buffers, losses, metrics. Noted in a trial, and shown
as if they were small, or large.

    if self.scale.item() < 0.5: x = x + x.cumsum(1)       no trial of the first steps sees this line, where the scale begins at 1
    x = torch.where(self.scale < 0.5, x.cumsum(1), x)     nor what it gives
    if loss < 2: loss = loss + extra(logits)              nor this, where the loss begins at 9

What is made of weights and buffers alone is followed. Of other single numbers those count that are not made of the batch's entries
(`numbers_read/`): what this package's functions give, a loss say, is of all tokens.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_sp.global_view.table import name_of
from lightning_sp.preflight.recording.hidden_terms import users_place
from lightning_sp.preflight.recording.numbers_read.followed_batches import follows_batches, is_of_batch
from lightning_sp.preflight.recording.numbers_read.read_numbers import COMPARISONS
from lightning_sp.preflight.recording.numbers_read.tracked_numbers import far_from_float, tracked_number
from lightning_sp.preflight.recording.users_lines import INSTALLED, ends_a_loop, only_notes

# So often a line is shown other numbers in a run: a loop that waits for one ends.
_MOST = 500
_BELOW = {"lt", "le", "less", "less_equal"}
_TRUTHS, _NUMBERS = {"__bool__", "is_nonzero"}, {"item", "tolist", "numpy", "__array__", "__float__", "__int__"}


class AlikeNumbers(TorchFunctionMode):
    """Notes the user's lines that read such numbers.

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
        self._times: Counter[str] = Counter()
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
        # Most calls of a step are neither: of a weight's numbers each call pays for this.
        of_weights = type(first) is not Tensor or id(first) in self._ids
        if not (of_weights or (_is_truth(output) and _may_be_loss(first))):
            return output
        flat = [part for each in args for part in (each if isinstance(each, (list, tuple)) else [each])]
        given = [each for each in flat if isinstance(each, Tensor)]
        of_weights = bool(given) and all(isinstance(each, nn.Parameter) or each in self._made for each in given)
        name = name_of(function)
        if isinstance(output, Tensor):
            if of_weights:
                self._note(output)
            if output.numel() != 1 or name not in COMPARISONS:
                return output
        elif name not in _TRUTHS | _NUMBERS:
            return output
        if not of_weights and (not follows_batches() or any(map(is_of_batch, given))):
            return output
        place = users_place(sys._getframe(1))
        if place is None or any(folder in place[0] for folder in INSTALLED):
            return output
        if not of_weights and (only_notes(*place) or ends_a_loop(*place)):
            return output
        self.lines.add(line := f"{place[0]}:{place[1]}")
        self._times[line] += 1
        if self._larger is None or self._times[line] > _MOST:
            return output
        if isinstance(output, Tensor):
            # `2 > loss` as `loss < 2`.
            is_first = isinstance(first, Tensor) and first.numel() == 1
            return torch.full_like(output, ((name in _BELOW) != self._larger) == is_first)
        return _shown(name, output, larger=self._larger)


def _is_truth(output: Any) -> bool:
    """Return whether a function has compared one number, or read it for Python."""
    if isinstance(output, Tensor):
        return output.dtype is torch.bool and output.numel() == 1
    return isinstance(output, (bool, int, float, np.ndarray))


def _may_be_loss(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point() and given.numel() == 1


def _shown(name: str, number: Any, *, larger: bool) -> Any:
    if name in _TRUTHS or isinstance(number, bool):
        return larger
    if name == "__int__":
        return int(far_from_float(float(number), larger=larger))
    if isinstance(number, np.ndarray) and number.dtype.kind == "f":
        return far_from_float(number, larger=larger)
    if not isinstance(number, float):
        return number
    # What Python's `float` gets keeps no trace of where a number comes from.
    return (far_from_float if name == "__float__" else tracked_number)(number, larger=larger)
