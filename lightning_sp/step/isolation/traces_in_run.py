"""What a step may leave in its run: in the Trainer, in optimizers and their schedules, in which parameters are trained.

if self.global_step >= 1_000: self.net.embedding.requires_grad_(False)     a trial shows the step this line at its beginning
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lightning_sp.users_code.kept_outside import NUMBERS

_CONTAINERS = (list, dict, set, deque)


def undo_in_run(root: nn.Module, trainer: Any) -> tuple[list[Callable[[], object]], list[Any]]:
    """Return what puts back the run that a module is in, and the mutable values of it whose contents are to be put back too.

    Args:
        root: whose parameters may be frozen.
        trainer: None outside of a run.
    """
    undo: list[Callable[[], object]] = [partial(each.requires_grad_, each.requires_grad) for each in root.parameters()]
    if trainer is None:
        return undo, []
    undo.append(partial(_restore_numbers, trainer, _numbers(trainer)))
    mutable: list[Any] = [each.param_groups for each in trainer.optimizers]
    for schedule in _with_inner([config.scheduler for config in trainer.lr_scheduler_configs]):
        attributes = vars(schedule)
        undo.append(partial(attributes.update, dict(attributes)))
        mutable += attributes.values()
    return undo, [each for each in mutable if isinstance(each, _CONTAINERS)]


def _with_inner(schedules: list[Any]) -> list[Any]:
    """Return schedules, and those that they are made of."""
    for each in schedules:  # which grows
        inner = [value for value in vars(each).values() if isinstance(value, (list, tuple))]
        schedules += [one for value in inner for one in value if isinstance(one, LRScheduler)]
    return schedules


def _numbers(owner: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if type(value) in NUMBERS and not name.startswith("__")}


def _restore_numbers(owner: Any, before: dict[str, Any]) -> None:
    for name, value in _numbers(owner).items():
        if name not in before:
            delattr(owner, name)
        elif before[name] is not value:
            setattr(owner, name, before[name])
    for name in before.keys() - vars(owner).keys():
        setattr(owner, name, before[name])
