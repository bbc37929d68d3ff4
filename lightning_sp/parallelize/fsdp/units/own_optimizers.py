"""Optimizers that a step makes and steps itself, beside those of `configure_optimizers`: of a probe, of a temperature.

A module shows whole weights while its step runs. Gradients that the step assigns are those of whole weights, and an optimizer that was made
before it steps shards: it would have no gradient, and what it writes would go when the whole weights are written back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups
from lightning_sp.parameter_names import user_name


@contextmanager
def refuses_own_steps(root: nn.Module) -> Iterator[None]:
    """Refuse steps of sharded weights while a step of automatic optimization runs. Equal on all ranks.

    Raises:
        SequenceParallelError: an optimizer steps a shard.
    """

    def check(optimizer: Any, *_: Any) -> None:
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        known = (each for group in parameter_groups(fsdp_modules(root)) for each in group.fsdp_params)
        found = next((each for each in known if id(each.sharded_param) in stepped), None)
        if found is None:
            return
        name = user_name(found._param_fqn or "")
        raise SequenceParallelError(
            f"training_step steps an optimizer of its own, {type(optimizer).__name__} of {name}: that has shards of weights, and what a step "
            "computes and assigns there is of whole ones. Return it from configure_optimizers, beside the other, and step both by hand: "
            "automatic_optimization = False, and in training_step optimizer.zero_grad(), self.manual_backward(loss), optimizer.step() of each "
            "of self.optimizers()"
        )

    hook = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()
