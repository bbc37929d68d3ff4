"""Results that a step keeps for later steps, its last loss say, and metrics that it reads: shown as if they were smaller, and larger.

    if self.last_loss < 2: labels[:, : self.skipped] = -100                      no trial of the first steps sees this line
    if self.trainer.callback_metrics.get("loss", 9) < 2: ...                     nor this one

Such a number is what it is where the step computes with it. Where Python compares it, it comes out as if it were small, or large; so does what
NumPy makes of several, `np.mean(self.losses[-10:])`, and what torch makes of a history of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_sp.global_view.table import name_of
from lightning_sp.preflight.recording.numbers_read.shown_functions import told_to_libraries
from lightning_sp.preflight.recording.numbers_read.tracked_numbers import (
    Budget,
    far_from_float,
    tracked_number,
)
from lightning_sp.step.users_numbers.counters import noting_numbers
from lightning_sp.step.users_numbers.results import Result, became_result, numbers_and_lists_of
from lightning_sp.trainer.shown_metrics import noted_metrics

_ABOVE, _BELOW = {"gt", "ge", "greater", "greater_equal"}, {"lt", "le", "less", "less_equal"}


def noting_results(run: Callable[[], Any], trainer: Any, found: list[Result]) -> Callable[[], Any]:
    """Return a step that notes which numbers it leaves that are no counts: it is run on one batch.

    Args:
        run: the step.
        trainer: of the run.
        found: takes them.
    """

    def note(owner: Any, before: dict[Any, Any], now: dict[Any, Any]) -> None:
        for name, value in now.items():
            if became_result(before.get(name), value):
                found.append(Result(owner, name, value))

    return noting_numbers(run, trainer, numbers_and_lists_of, note)


@contextmanager
def results_shown(module: Any, results: Sequence[Result], metrics: set[str], budget: Budget) -> Iterator[None]:
    """Show results and metrics as if they were small, or large, and put them back."""
    shown = {name: torch.ones(()) for name in metrics}
    with ExitStack() as undo:
        tensors = [*shown.values()]
        for owner, name, value in results:
            held = _held(owner, name)
            if isinstance(held, Tensor):
                tensors.append(held)
            else:
                undo.callback(_put, owner, name, held)
                # A list that is as long as later in the run ends with them.
                before = held[: -len(value)] if isinstance(owner, (list, deque)) else []
                _put(owner, name, _tracked([*before, *value] if before else value, budget))
        undo.enter_context(noted_metrics(module, shown))
        undo.enter_context(told_to_libraries(module))
        undo.enter_context(_Shown(tensors, budget))
        yield


_ABSENT = object()


def _tracked(value: Any, budget: Budget) -> Any:
    if isinstance(value, list):
        return [_tracked(each, budget) for each in value]
    return tracked_number(value, budget) if isinstance(value, float) else value


def _held(owner: Any, name: Any) -> Any:
    if isinstance(owner, (list, deque)):
        return list(owner)
    return owner.get(name, _ABSENT) if isinstance(owner, dict) else getattr(owner, name, _ABSENT)


def _put(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, (list, deque)):
        owner.clear()
        owner.extend(value)
    elif value is _ABSENT:
        if isinstance(owner, dict):
            owner.pop(name, None)
        elif hasattr(owner, name):
            delattr(owner, name)
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


class _Shown(TorchFunctionMode):
    """Has comparisons of single numbers come out as if they were small, or large, by what they are made of."""

    def __init__(self, tensors: Sequence[Tensor], budget: Budget) -> None:
        super().__init__()
        self._of = {id(each): each for each in tensors}
        self._budget = budget

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        place = next((i for i, each in enumerate(args[:2]) if id(each) in self._of), None)
        if place is None or self._budget.left <= 0:
            return output
        name = name_of(function)
        if name in _ABOVE | _BELOW and isinstance(output, Tensor) and output.numel() == 1:
            return torch.full_like(output, ((name in _ABOVE) == self._budget.larger) == (place == 0))
        if name == "item" and isinstance(output, float):
            return tracked_number(output, self._budget)
        if name == "__float__":
            return far_from_float(output, larger=self._budget.larger)  # it keeps no trace of where it comes from
        if isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
            # Of several, what is made of results alone: a history's last ones.
            alone = all(id(each) in self._of for each in args if isinstance(each, Tensor))
            self._of |= {id(output): output} if alone or output.numel() == 1 else {}
        return output
