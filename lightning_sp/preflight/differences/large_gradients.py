"""Steps whose backward does not pass gradients on in proportion: a hook that clips them, an `autograd.Function` that clamps them.

    logits.register_hook(lambda g: g / g.norm().clamp(min=1))      on a part it sees a part's norm; and nothing of it while norms are below 1

One device's run is repeated with a loss that is many times as large: all gradients are then as many times as large, or something clips them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize import with_backward_hooks
from lightning_sp.preflight.comparison import averaged, gradient_differences
from lightning_sp.preflight.explain.verdict import relative_differences, tolerance_of
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.trial import Trial

# A power of two: what is in proportion is so to the last digit.
_TIMES = 2.0**20
_NOT_THE_USERS = ("torch.", "lightning_sp.", "lightning.")
_NOT_LOOKED_AT = "preflight: not compared with large gradients, of which {} may make something else: {}"


def check_large_gradients(trial: Trial, whole: Outcome) -> None:
    """Refuse a step on parts whose own backward makes something else of large gradients. Every rank must call it.

    Args:
        trial: of the step.
        whole: what it gave whole.

    Communicates: whether any rank's step has a backward of its own; one whole run where it has.

    Raises:
        SequenceParallelError: it does not pass gradients on in proportion.
    """
    module: Any = trial.module
    size = trial.context.mesh.layout.size
    names = [*_own_backwards(module, whole)] if size > 1 and not trial.context.global_view else []
    found = sorted({each for of_rank in comm.gather_objects(names, trial.control_group) for each in of_rank})
    if not found or whole.loss is None:
        return
    if not module.automatic_optimization:
        rank_zero_info(_NOT_LOOKED_AT.format(", ".join(found[:3]), "the step goes backward by itself"))
        return
    large = replace(trial, run_whole=partial(_enlarged, trial.run_whole)).whole()
    assert large.loss is not None
    gradients = {name: None if each is None else each / _TIMES for name, each in large.gradients.items()}
    differences = gradient_differences(averaged(whole.loss), averaged(large.loss) / _TIMES, whole.gradients, gradients)
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
            "device's; or train without sequence parallelism"
        )


def _enlarged(run: Callable[[], Any]) -> Any:
    output = run()
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        return {**output, "loss": output["loss"] * _TIMES}
    return output * _TIMES if isinstance(output, Tensor) else output


def _own_backwards(module: nn.Module, whole: Outcome) -> Iterator[str]:
    """Yield the hooks of the user's on gradients of a step, and the functions of autograd that are not torch's."""
    yield from (f"a hook at {line}" for line in whole.read.hooked)
    yield from (f"a backward hook of {name}" for name in with_backward_hooks(module))
    functions = (each for each in _functions(whole.loss) if not each.__module__.startswith(_NOT_THE_USERS))
    yield from (f"the autograd.Function {each.__name__}" for each in functions)


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
