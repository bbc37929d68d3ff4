"""Steps whose backward does not pass gradients on in proportion: a hook that clips them, an `autograd.Function` that clamps them.

    logits.register_hook(lambda g: g / g.norm().clamp(min=1))      on a part it sees a part's norm; and nothing of it while norms are below 1

One device's run is repeated with a loss that is many times as large: all gradients are then as many times as large, or something clips them.
With manual optimization it is what each backward of the step adds: between these the step itself may clip the gradients of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize import with_backward_hooks
from lightning_sp.preflight.comparison import averaged, gradient_differences, plain_name
from lightning_sp.preflight.explain.verdict import relative_differences, tolerance_of
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.trial import Trial

# A power of two: what is in proportion is so to the last digit.
_TIMES = 2.0**20
_NOT_THE_USERS = ("torch.", "lightning_sp.", "lightning.")
_NOT_LOOKED_AT = "preflight: not compared with large gradients, of which {} may make something else: {}"


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


class Backwards:
    """The backwards that a step of manual optimization runs itself; a class because they come one by one.

    Args:
        module: whose step it is.
        times: as many times as large is each loss; None where no gradients are noted.

    Attributes:
        functions: of autograd that are not torch's, by name.
        gradients: what the backwards add, the later ones weighed more, by parameter.
    """

    def __init__(self, module: nn.Module, times: float | None = None) -> None:
        self._module, self._times = module, times
        self.functions: set[str] = set()
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self._weight = 1.0

    def noting(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return a run in which these are noted."""
        module: Any = self._module
        return run if module.automatic_optimization else partial(self._run, run)

    def _run(self, run: Callable[[], Any]) -> Any:
        module: Any = self._module
        self.gradients, self._weight = {}, 1.0
        before, module.backward = vars(module).get("backward"), partial(self._backward, module.backward)
        try:
            return run()
        finally:
            if before is None:
                del module.backward
            else:
                module.backward = before

    def _backward(self, own: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.functions |= {*_own_functions(loss)}
        if self._times is None:
            own(loss, *args, **kwargs)
            return
        module: Any = self._module
        # Between a forward and its backward modules may have whole weights, without gradients.
        groups = (group for each in module.trainer.optimizers for group in each.param_groups)
        before = {each: _copy(each.grad) for group in groups for each in group["params"]}
        own(loss * self._times, *args, **kwargs)
        for each, had in before.items():
            if each.grad is not None:
                added = self._weight * (each.grad.detach() if had is None else each.grad.detach() - had)
                self.gradients[each] = self.gradients[each] + added if each in self.gradients else added
        self._weight += 1


def check_large_gradients(trial: Trial, whole: Outcome, functions: Collection[str]) -> None:
    """Refuse a step on parts whose own backward makes something else of large gradients. Every rank must call it.

    Args:
        trial: of the step.
        whole: what it gave whole.
        functions: of autograd in what it went backward from by itself, as `Backwards` has them.

    Communicates: whether any rank's step has a backward of its own; one whole run where it has, two with manual optimization.

    Raises:
        SequenceParallelError: it does not pass gradients on in proportion.
    """
    module: Any = trial.module
    size = trial.context.mesh.layout.size
    names = [*_own_backwards(module, whole, functions)] if size > 1 and not trial.context.global_view else []
    found = sorted({each for of_rank in comm.gather_objects(names, trial.control_group) for each in of_rank})
    if not found or whole.loss is None:
        return
    loss = averaged(whole.loss)
    if module.automatic_optimization:
        large, gradients = replace(trial, run_whole=partial(_enlarged, trial.run_whole)).whole(), whole.gradients
        assert large.loss is not None
        enlarged, large_loss = large.gradients, averaged(large.loss) / _TIMES
    else:
        gradients, enlarged, large_loss = _added(trial, 1.0), _added(trial, _TIMES), loss
    smaller = {name: None if each is None else each / _TIMES for name, each in enlarged.items()}
    differences = gradient_differences(loss, large_loss, gradients, smaller)
    relative = relative_differences(differences)
    if not all(map(math.isfinite, relative.values())):
        rank_zero_info(_NOT_LOOKED_AT.format(", ".join(found[:3]), "gradients that are so large are not finite"))
        return
    others = [name for name, each in relative.items() if each > tolerance_of(whole.dtypes)]
    if others:
        raise SequenceParallelError(
            f"preflight: training_step does not pass gradients on in proportion: on {trial.crop}, with a loss that is {_TIMES:,.0f} times as "
            f"large, {len(others)} of {len(gradients)} gradients are not as many times as large, {others[0]}'s say. It has "
            f"{', '.join(found[:3])}. On shards that sees the gradient of this rank's part of the tokens, which is {size} times as large and "
            "has another norm and another maximum: clip, clamp or normalize gradients of parameters, in on_before_optimizer_step, which are one "
            "device's (with manual optimization behind self.manual_backward); or train without sequence parallelism"
        )


def _added(trial: Trial, times: float) -> dict[str, Tensor | None]:
    """Return this rank's shard of what the backwards of a step of manual optimization add, with losses so many times as large."""
    backwards = Backwards(trial.module, times)
    replace(trial, run_whole=backwards.noting(trial.run_whole)).whole()
    added = {name: backwards.gradients.get(each) for name, each in trial.module.named_parameters()}
    return {plain_name(name): each.to_local() if isinstance(each, DTensor) else each for name, each in added.items()}


def _enlarged(run: Callable[[], Any]) -> Any:
    output = run()
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        return {**output, "loss": output["loss"] * _TIMES}
    return output * _TIMES if isinstance(output, Tensor) else output


def _own_backwards(module: nn.Module, whole: Outcome, functions: Collection[str]) -> Iterator[str]:
    """Yield the hooks of the user's on gradients of a step, and the functions of autograd that are not torch's."""
    yield from (f"a hook at {line}" for line in whole.read.hooked)
    yield from (f"a backward hook of {name}" for name in with_backward_hooks(module))
    yield from (f"the autograd.Function {each}" for each in (*_own_functions(whole.loss), *functions))


def _own_functions(loss: Tensor | None) -> Iterator[str]:
    """Yield the functions of autograd that a loss was made by, and that are not torch's, by name."""
    yield from (each.__name__ for each in _functions(loss) if not each.__module__.startswith(_NOT_THE_USERS))


def _functions(loss: Tensor | None) -> Iterator[Any]:
    """Yield the functions with a backward in Python that a loss was made by."""
    waiting: list[Any] = [] if loss is None or loss.grad_fn is None else [loss.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if isinstance(node, BackwardCFunction):
            yield node._forward_cls  # type: ignore[attr-defined]
        others = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= others
        waiting += others
