"""What a step may leave in its run: in the Trainer, in optimizers and their schedules, in which parameters are trained.

if self.global_step >= 1_000: self.net.embedding.requires_grad_(False)     a trial shows the step this line at its beginning
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_sp.users_code.kept_outside import NUMBERS
from lightning_sp.users_code.ownership import is_object_of_user

_CONTAINERS = (list, dict, set, deque)
_KEPT = (*_CONTAINERS, tuple, Tensor, np.ndarray)
# Put back by itself, or none of a step's.
_OF_LIGHTNING = frozenset({"callbacks", "datamodule", "profiler", "_loggers"})


def undo_in_run(root: nn.Module, trainer: Any) -> tuple[list[Callable[[], object]], list[Any]]:
    """Return what puts back the run that a module is in, and the mutable values of it whose contents are to be put back too.

    Args:
        root: whose parameters may be frozen.
        trainer: None outside of a run.
    """
    undo: list[Callable[[], object]] = [partial(each.requires_grad_, each.requires_grad) for each in root.parameters()]
    if trainer is None:
        return undo, []
    undo.append(partial(_restore_values, trainer, kept := _values(trainer)))
    mutable: list[Any] = [each.param_groups for each in trainer.optimizers]
    for schedule in _with_inner([config.scheduler for config in trainer.lr_scheduler_configs]):
        attributes = vars(schedule)
        undo.append(partial(attributes.update, dict(attributes)))
        mutable += attributes.values()
    # In a trial no optimizer of the run steps, but one that it holds may: `second_step` of sharpness-aware minimization has it step.
    around = {
        each: [inner for inner in vars(each).values() if isinstance(inner, Optimizer)] for each in trainer.optimizers
    }
    mutable += [each.state for each, inner in around.items() if inner]
    held = [one for inner in around.values() for one in inner]
    return undo, [*(each for each in mutable if isinstance(each, _CONTAINERS)), *kept.values(), *held]


def _with_inner(schedules: list[Any]) -> list[Any]:
    """Return schedules, and those that they are made of."""
    for each in schedules:  # which grows
        inner = [value for value in vars(each).values() if isinstance(value, (list, tuple))]
        schedules += [one for value in inner for one in value if isinstance(one, LRScheduler)]
    return schedules


def _values(trainer: Any) -> dict[str, Any]:
    """Return the numbers of a Trainer, and what users have put beside them: self.trainer.tokens["seen"] += ids.numel()."""
    return {
        name: value
        for name, value in vars(trainer).items()
        if not (name.startswith("__") or name in _OF_LIGHTNING)
        and (type(value) in NUMBERS or isinstance(value, _KEPT) or is_object_of_user(value))
    }


def _restore_values(owner: Any, before: dict[str, Any]) -> None:
    for name, value in _values(owner).items():
        if name not in before:
            delattr(owner, name)
        elif before[name] is not value:
            setattr(owner, name, before[name])
    for name in before.keys() - vars(owner).keys():
        setattr(owner, name, before[name])
