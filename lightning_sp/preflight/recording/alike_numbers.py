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
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_sp.global_view.table import name_of
from lightning_sp.preflight.recording.hidden_terms import users_place
from lightning_sp.preflight.recording.numbers_read.followed_batches import (
    follows_batches,
    is_of_batch,
    runs_begun,
)
from lightning_sp.preflight.recording.numbers_read.read_numbers import COMPARISONS
from lightning_sp.preflight.recording.numbers_read.tracked_numbers import (
    Budget,
    far_from_float,
    tracked_number,
)
from lightning_sp.preflight.recording.users_lines import INSTALLED, ends_a_loop, only_notes

# So many times more often than a run as it is has read a line, and so many times besides, one that is shown numbers may: it is a loop that
# waits for one, and each round may be a forward.
_TIMES, _MORE = 2, 16
_BELOW = {"lt", "le", "less", "less_equal"}
_TRUTHS, _NUMBERS = {"__bool__", "is_nonzero"}, {"item", "tolist", "numpy", "__array__", "__float__", "__int__"}


class AlikeNumbers(TorchFunctionMode):
    """Notes the user's lines that read such numbers.

    Args:
        module: whose buffers count as its weights do.
        budget: by which these come out as if they were large, or small; None as they are. It begins anew with each run.
        read: how often a run has read each line, where these were as they are.

    Attributes:
        lines: by file and line.
        often: how often one run has read each.
        numbers: those of them that have a number of Python's by it.
    """

    def __init__(self, module: nn.Module, budget: Budget | None = None, read: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.lines: set[str] = set()
        self.numbers: set[str] = set()
        self.often: Counter[str] = Counter()
        self._budget, self._read = budget, read or {}
        self._times, self._run = Counter[str](), runs_begun()
        self._made = WeakTensorKeyDictionary()
        # Of what is in it and of what was: a first look that costs less.
        self._ids: set[int] = set()
        for each in module.buffers():
            self._note(each)

    def _note(self, tensor: Tensor) -> None:
        self._made[_in_memory(tensor)] = True
        self._ids.add(id(tensor))

    def _begin(self) -> None:
        """Begin to count anew with each run: whole and sharded alike."""
        self._run = runs_begun()
        self._times.clear()
        if self._budget is not None:
            self._budget.refill()

    def _is_shown(self, line: str) -> bool:
        """Return whether a line that reads a number is shown another, and count it."""
        self._times[line] += 1
        self.often[line] = max(self.often[line], self._times[line])
        if self._budget is None:
            return False
        if self._times[line] > _TIMES * self._read.get(line, 0) + _MORE:
            self._budget.left = 0  # of what it has read before, too
        return self._budget.left > 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._run != runs_begun():
            self._begin()
        output = function(*args, **(kwargs or {}))
        first = args[0] if args else None
        # Most calls of a step are neither: of a weight's numbers each call pays for this.
        of_weights = type(first) is not Tensor or id(first) in self._ids
        if not (of_weights or (_is_truth(output) and _may_be_loss(first))):
            return output
        flat = [part for each in args for part in (each if isinstance(each, (list, tuple)) else [each])]
        given = [each for each in flat if isinstance(each, Tensor)]
        of_weights = bool(given) and all(
            isinstance(each, nn.Parameter) or _in_memory(each) in self._made for each in given
        )
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
        if name in _NUMBERS:
            self.numbers.add(line)
        if not self._is_shown(line) or self._budget is None:
            return output
        if self._budget.plain and name not in _NUMBERS:
            return output
        if isinstance(output, Tensor):
            # `2 > loss` as `loss < 2`.
            is_first = isinstance(first, Tensor) and first.numel() == 1
            return torch.full_like(output, ((name in _BELOW) != self._budget.larger) == is_first)
        return _shown(name, output, self._budget)


def _in_memory(tensor: Tensor) -> Tensor:
    """Return what is referred to weakly: of a DTensor its part, for torch swaps none that is (`self.router.to(...)` of a forward)."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _is_truth(output: Any) -> bool:
    """Return whether a function has compared one number, or read it for Python."""
    if isinstance(output, Tensor):
        return output.dtype is torch.bool and output.numel() == 1
    return isinstance(output, (bool, int, float, np.ndarray))


def _may_be_loss(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point() and given.numel() == 1


def _shown(name: str, number: Any, budget: Budget) -> Any:
    larger = budget.larger
    if name in _TRUTHS or isinstance(number, bool):
        return larger
    if name == "__int__":
        return int(far_from_float(float(number), larger=larger))
    if isinstance(number, np.ndarray) and number.dtype.kind == "f":
        return far_from_float(number, larger=larger)
    if not isinstance(number, float):
        return number
    # What Python's `float` gets keeps no trace of where a number comes from, as nothing does that C makes of one.
    is_plain = budget.plain or name == "__float__"
    return far_from_float(number, larger=larger) if is_plain else tracked_number(number, budget)
