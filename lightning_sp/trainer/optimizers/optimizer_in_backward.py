"""Steps in the backward: a unit of FSDP is stepped when its gradients are complete, and these are freed.

    backward         head | block n | ... | block 0 | embedding          reduced, stepped, freed, one after the other
    behind it        what is known only then: parameters that this rank did not use, or a step read by itself, units that ran in other ways

The optimizer is the user's own, with its groups, schedules and states; of a unit's step it is shown that unit's parameters. What one device
steps at the end it steps here earlier, with the same gradients, and no forward or backward of the micro-batch reads a unit's weights after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize import forget_reads, is_read_outside, used_parameters
from lightning_sp.parameter_names import user_name
from lightning_sp.trainer.optimizers.optimizer_trial import ELEMENTWISE, verdict_on_parts
from lightning_sp.trainer.optimizers.part_steps import step_only


class OptimizerInBackward:
    """The steps of one optimizer; a class because a unit's gradients may be on their way while the next unit's backward runs.

    Args:
        optimizer: of the sharded module.
        module: sharded.
        group: the world, on a backend for host tensors.
        in_flight: units whose gradients may be on their way before the oldest is waited for: a device reduces them beside the backward.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, group: ProcessGroup | None, in_flight: int) -> None:
        used = used_parameters(module)
        assert used is not None
        self._optimizer, self._used, self._group, self._in_flight = optimizer, used, group, in_flight
        # Ranks that gather in a step must step the same parameters: they agree for each unit.
        self._agrees = type(optimizer) not in ELEMENTWISE
        self._original = optimizer.step
        self._runs_closure = False
        self._may_step: Callable[[], bool] | None = None  # to be asked once in a backward
        self._is_on = False
        self._reduced: list[tuple[Any, dict[Tensor, bool]]] = []
        self._completed: set[Any] = set()
        self._options: dict[str, Any] = {}

    def install(self) -> None:
        """Let the optimizer's `step` be this one's."""

        @wraps(self._original)
        def step(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
            return self._original(**options) if closure is None else self._step(closure, **options)

        # As in `whole_steps`: a scheduler made later would wrap it once more, as a method of the class.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._optimizer.step = step  # type: ignore[method-assign]
        self._used.steps_in_backward = True

    def uninstall(self) -> None:
        """Give the optimizer its own step back."""
        self._optimizer.step = self._original  # type: ignore[method-assign]
        self._used.steps_in_backward = False

    @contextmanager
    def during_backward(self, may_step: Callable[[], bool]) -> Iterator[None]:
        """Step what a backward within leaves complete, where the optimizer's step has called for it.

        Args:
            may_step: asked on all ranks before the first unit is stepped; where it says no, all is stepped behind the backward.
        """
        if (
            not self._runs_closure
        ):  # a user's own code runs the closure: what it does to gradients before it steps is not known
            yield
            return
        self._may_step, self._is_on = may_step, True
        self._used.when_complete, self._used.when_more = self._complete, self._refuse_more
        try:
            yield
        finally:
            self._used.when_complete = None

    def _step(self, closure: Callable[[], Any], **options: Any) -> Any:
        self._check_hooks()
        self._runs_closure, self._options = True, options
        self._used.count_calls()
        self._completed.clear()
        forget_reads(self._parameters())
        try:
            result = closure()
        finally:
            self._runs_closure = False
            self._reduced.clear()
        self._step_and_free({each for each in self._parameters() if each.grad is not None})
        return result

    def _check_hooks(self) -> None:
        # An optimizer around another may lack them.
        names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        hooks = [hook for name in names for hook in getattr(self._optimizer, name, {}).values()]
        if hooks:
            raise SequenceParallelError(
                f"optimizer_in_backward=True with {len(hooks)} hooks of {type(self._optimizer).__name__}'s step: it steps once for each block, "
                "and they would be called as often; use a hook of the Trainer (on_train_batch_end), or leave optimizer_in_backward=False"
            )

    def _complete(self, unit: Any, parameters: dict[nn.Parameter, bool]) -> None:
        """Step a unit, or one before it whose gradients have arrived; it is told on all ranks alike."""
        if self._may_step is not None:
            ask, self._may_step = self._may_step, None
            self._is_on = ask()
        if not self._is_on:
            return
        self._completed.add(unit)
        used = [*parameters.values()]
        if self._agrees:
            used = comm.largest(torch.tensor(used, dtype=torch.uint8), self._group).bool().tolist()
        self._reduced.append((unit, {each: now for each, now in zip(parameters, used, strict=True)}))
        while len(self._reduced) > self._in_flight:
            self._step_unit(*self._reduced.pop(0))

    def _refuse_more(self, unit: Any) -> None:
        """Refuse a second backward through a unit whose weights are stepped by now. Alike on all ranks."""
        if unit in self._completed:
            raise SequenceParallelError(
                f"optimizer_in_backward=True with a second backward through {user_name(unit._module_fqn or 'the model')}: its weights were "
                "stepped in the first one (a LightningModule.backward of one's own, say, that goes over a graph twice); add the losses up and "
                "go backward once, or leave optimizer_in_backward=False"
            )

    def _step_unit(self, unit: Any, used: dict[Tensor, bool]) -> None:
        """Step what is known to be used of a unit; the rest waits for the backward's end."""
        if (event := unit._post_reduce_event) is not None:
            unit.device_handle.current_stream().wait_event(event)
        used = {each: now and not is_read_outside(each) for each, now in used.items()}
        for each, now in used.items():
            if not now:  # alone it would keep all of the unit's: they are one buffer
                each.grad = each.grad.clone()  # type: ignore[union-attr]
        self._step_and_free({each for each, now in used.items() if now})

    def _step_and_free(self, chosen: set[Tensor]) -> None:
        step_only(self._optimizer, self._original, chosen, **self._options)
        for each in self._parameters():
            if each in chosen:
                each.grad = None

    def _parameters(self) -> list[Tensor]:
        return [each for group in self._optimizer.param_groups for each in group["params"]]


def step_in_backward(
    optimizers: Sequence[Optimizer], module: nn.Module, device: torch.device, group: ProcessGroup | None
) -> OptimizerInBackward:
    """Let the one optimizer of a sharded module step in the backward. Every rank must call it.

    Args:
        optimizers: of the run.
        module: sharded.
        device: of this rank.
        group: the world, on a backend for host objects.

    Raises:
        SequenceParallelError: there are several, or it cannot step some of its parameters before others.
    """
    if len(optimizers) != 1:
        raise SequenceParallelError(
            f"optimizer_in_backward=True with {len(optimizers)} optimizers: which of them a backward is for is not known; configure_optimizers "
            "must return one, or leave optimizer_in_backward=False"
        )
    [optimizer] = optimizers
    name = type(optimizer).__name__
    if (why := verdict_on_parts(optimizer, group)) is not None:
        raise SequenceParallelError(
            f"optimizer_in_backward=True with {name}: {why}, so that its step of one block before the next is not known to be that of all at "
            "once; use an optimizer that steps each weight by itself (AdamW, SGD), or leave optimizer_in_backward=False"
        )
    found = OptimizerInBackward(optimizer, module, group, in_flight=0 if device.type == "cpu" else 1)
    found.install()
    return found
