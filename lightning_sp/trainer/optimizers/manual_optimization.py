"""A training_step of manual optimization, tried: what it hands to backward and to its optimizers is kept, and no optimizer moves.

    loss       sum over backwards of the losses                      what one automatic step would return
    gradient   sum over steps k of (1 + 0.37 k) gradient at step k   what an optimizer takes, the last one what none has taken

The weights differ so that steps which take opposite gradients do not cancel out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sp.context.step import SequenceContext
from lightning_sp.loss.counted_terms import counted_terms
from lightning_sp.parallelize import RootUnit

_WEIGHT = 0.37


class _Steps:
    """The losses and gradients of one run; a class because backwards and steps arrive one by one."""

    def __init__(self, module: LightningModule, context: SequenceContext) -> None:
        self._module, self._context = module, context
        self.root_unit = RootUnit(module)
        self._losses: list[Tensor] = []
        self._taken: dict[nn.Parameter, Tensor] = {}
        self._num_steps = 0

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """In the place of manual_backward."""
        self._losses.append(loss.detach())
        if loss.requires_grad:  # not where a crop runs without gradients
            with counted_terms(loss, self._context):
                self._module.backward(self.root_unit.prepare_backward(loss), *args, **kwargs)

    def leave(self) -> Tensor | None:
        """Leave in every parameter what was taken, and return the loss: 0 of gradients without a backward, None without either."""
        self.take(self._module.parameters())
        for parameter, gradient in self._taken.items():
            parameter.grad = gradient
        if self._losses:
            return sum(self._losses[1:], self._losses[0])
        return torch.zeros(()) if self._taken else None  # as `torch.autograd.grad` gives them

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep the gradients that an optimizer would step by."""
        self.root_unit.give_assigned()
        weight = 1 + _WEIGHT * self._num_steps
        self._num_steps += 1
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = parameter.grad.detach() * weight
                self._taken[parameter] = self._taken[parameter] + gradient if parameter in self._taken else gradient


def tried_training_step(strategy: Any, *args: Any) -> Any:
    """Run training_step as Lightning does; with manual optimization no optimizer and no scheduler of it moves.

    Returns:
        What it returned. With manual optimization the sum of its losses, detached, with the gradients left in the parameters; None where it
        has neither.
    """
    module = strategy.lightning_module
    if module.automatic_optimization:
        return Strategy.training_step(strategy, *args)
    steps = _Steps(module, strategy._steps.context)
    with _stubbed(strategy, module, steps), steps.root_unit.used_again():
        Strategy.training_step(strategy, *args)
    return steps.leave()


@contextmanager
def _stubbed(strategy: Strategy, module: LightningModule, steps: _Steps) -> Iterator[None]:
    with ExitStack() as undo:
        _replace(undo, module, "manual_backward", steps.backward)
        for wrapped in strategy._lightning_optimizers:
            optimizer = wrapped.optimizer
            step = _Step(steps, optimizer)
            _replace(undo, wrapped, "step", step)
            _replace(undo, optimizer, "step", step)
            _replace(undo, optimizer, "_opt_called", True)  # schedulers warn where nothing has stepped
            for group in optimizer.param_groups:
                undo.callback(group.update, {k: deepcopy(v) for k, v in group.items() if k != "params"})
        for config in strategy.lr_scheduler_configs:
            undo.callback(config.scheduler.load_state_dict, deepcopy(config.scheduler.state_dict()))
        for parameter in module.parameters():
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
        yield


class _Step:
    """In the place of an optimizer's step; a class because schedulers look for an attribute of it."""

    _wrapped_by_lr_sched = True

    def __init__(self, steps: _Steps, optimizer: Optimizer) -> None:
        self._steps = steps
        self._optimizer = optimizer

    def __call__(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        output = None if closure is None else closure()
        self._steps.take(parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return output


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of an object, and have the object as it was afterwards."""
    attributes = vars(owner)
    if name in attributes:
        undo.callback(attributes.__setitem__, name, attributes[name])
    else:
        undo.callback(attributes.pop, name, None)
    attributes[name] = value
