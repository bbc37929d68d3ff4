"""Steps of an optimizer that cannot step shards: it is given whole weights, gradients and states, the same on all ranks, for a moment.

    weight, gradient, state of the weight's shape      gathered before the step, split again after it
    other states (Adafactor's rows and columns)        whole on every rank

At rest all is sharded as ever, and so it is stored. For the step each rank holds what the optimizer holds on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sp.checkpoint import sharded_like
from lightning_sp.trainer.optimizers.optimizer_trial import cuda_devices, verdict_on_shards

Closure = Callable[[], Any]


def step_whole_where_needed(optimizers: Sequence[Optimizer], group: ProcessGroup | None) -> None:
    """Let each optimizer that cannot step shards step whole weights, and say so; and which could not be tried. Every rank must call it.

    Args:
        optimizers: of sharded parameters.
        group: the world, on a backend for host objects.
    """
    for optimizer in optimizers:
        fails, untried = verdict_on_shards(optimizer, group)
        if untried:
            rank_zero_warn(
                f"{type(optimizer).__name__} could not be tried on small weights ({untried}): it steps sharded weights, and whether these steps "
                "are one device's is not known. They are where it treats each element alone, or sees rows and norms through torch's own "
                "operations; not where it unwraps shards (`to_local()`). One that is made of (params, **defaults) can be tried"
            )
        elif fails:
            parameters = [p for each in optimizer.param_groups for p in each["params"]]
            size = sum(p.numel() * p.element_size() for p in parameters) / 2**20
            rank_zero_warn(
                f"{type(optimizer).__name__} cannot step sharded weights ({fails}): each of its steps gathers {len(parameters)} weights, their "
                f"gradients and states, {size:.1f} MiB each, on every rank, and is one device's. An optimizer that steps element by element, "
                "AdamW or SGD, needs no gathering"
            )
            WholeSteps(optimizer).install()


class WholeSteps:
    """The steps of one optimizer; a class because a closure comes back to the shards within a step.

    Args:
        optimizer: whose steps these are.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._wholes: dict[nn.Parameter, nn.Parameter] = {}  # of each sharded parameter, for as long as a step lasts
        self._num_steps = 0

    def install(self) -> None:
        """Let the optimizer's `step` be this one's."""
        original = self._optimizer.step

        @wraps(original)
        def step(closure: Closure | None = None, **options: Any) -> Any:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
            return self.step(original, closure, **options)

        # A scheduler made later would wrap it once more, as a method of the class; what it wants to know is noted above.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._optimizer.step = step  # type: ignore[method-assign]

    def step(self, original: Callable[..., Any], closure: Closure | None = None, **options: Any) -> Any:
        """Step whole weights.

        Args:
            original: the optimizer's own step.
            closure: runs the model on shards; more than once for an optimizer that asks again (L-BFGS).
            options: of the optimizer's own step.
        """
        answers = [] if closure is None else [closure()]

        def again() -> Any:
            if answers:
                return answers.pop()
            assert closure is not None
            self._to_shards()
            answer = closure()
            self._to_wholes()
            return answer

        self._num_steps += 1
        self._to_wholes()
        try:
            with torch.random.fork_rng(devices=cuda_devices(self._optimizer)):
                torch.manual_seed(self._num_steps)  # alike on all ranks, which make the same step
                return original(**options) if closure is None else original(again, **options)
        finally:
            self._to_shards()
            self._wholes.clear()

    @torch.no_grad()
    def _to_wholes(self) -> None:
        """Gather weights, gradients and states, and give them to the optimizer."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, DTensor):
                    self._gather(parameter)
            group["params"][:] = [self._wholes.get(p, p) for p in group["params"]]
        self._rename_states(self._wholes, lambda value, _: _gathered(value))

    def _gather(self, parameter: Any) -> None:
        weight = _gathered(parameter.detach())
        if parameter in self._wholes:  # an optimizer's step may hold it
            self._wholes[parameter].copy_(weight)
        else:
            self._wholes[parameter] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
        whole = self._wholes[parameter]
        whole.grad = None if parameter.grad is None else _gathered(parameter.grad)

    @torch.no_grad()
    def _to_shards(self) -> None:
        """Give the optimizer its shards back, with what the wholes have become."""
        parameters = {whole: parameter for parameter, whole in self._wholes.items()}
        for group in self._optimizer.param_groups:
            group["params"][:] = [parameters.get(p, p) for p in group["params"]]
        for whole, parameter in parameters.items():
            parameter.to_local().copy_(sharded_like(whole, parameter).to_local())  # type: ignore[attr-defined]
        self._rename_states(parameters, sharded_like)

    def _rename_states(self, names: dict[nn.Parameter, nn.Parameter], made: Callable[..., Any]) -> None:
        """Give the states of some parameters to others, each value made anew; the dicts stay, for a step in progress may hold one."""
        state = self._optimizer.state
        for old, new in names.items():
            if old in state:
                values = state[new] = state.pop(old)
                values.update({name: made(value, new) for name, value in values.items()})


def _gathered(value: Any) -> Any:
    """Return a sharded tensor whole; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    whole: Tensor = value.full_tensor()
    return (
        whole.clone() if whole.untyped_storage().data_ptr() == value.to_local().untyped_storage().data_ptr() else whole
    )
