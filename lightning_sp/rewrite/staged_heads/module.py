"""An attention module whose heads run in stages: its own forward, once for each stage, up to the attention.

    forward     stage 0: forward(x) with the stage's rows of q, k, v -> attention -> out, lse          without a graph
                stage 1: ...
                then forward(x) once more, with nan for q, k, v of a stage: its attention returns the out of all heads,
                so that what follows it (o_proj) and what is returned are the module's own
    backward    stage 0: forward(x) with a graph, up to the attention -> dq, dk, dv -> gradients of x and of the stage's rows
                stage 1: ...

Of q, k and v, and of what was exchanged, one stage's are alive. The out of all heads is saved, for o_proj needs it; no kernel runs twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_sp.attention.spec.codec import AttentionSpec
from lightning_sp.attention.staged import StageInputs, StageOutputs, staged_attention
from lightning_sp.context.head_stage import HeadStage
from lightning_sp.context.step import SequenceContext
from lightning_sp.rewrite.staged_heads.gradients import StagedCall, attach
from lightning_sp.rewrite.staged_heads.stages import Arguments, Stages
from lightning_sp.rewrite.staged_heads.structure import AttentionHeads

# What a module would write its keys to, once for each stage.
_CACHES = ("past_key_values", "past_key_value", "cache", "layer_past")


class StagedAttention:
    """What stands for an attention module's forward; a class because it is recognised by.

    Args:
        context: with or without a step in progress.
        module: the attention module.
        heads: of it, in stages.
    """

    def __init__(self, context: SequenceContext, module: nn.Module, heads: AttentionHeads) -> None:
        self._context, self._heads = context, heads
        self.__signature__ = inspect.signature(module.forward)
        self._stages, self._is_checked = Stages(context, module, heads), False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's forward returns."""
        learns, caches = torch.is_grad_enabled(), [name for name in _CACHES if kwargs.get(name) is not None]
        # In training nothing reads a cache, as in a checkpointed block; in evaluation it holds the keys of all heads anyway.
        uncached = {**kwargs, **dict.fromkeys(caches)}
        arguments, tensors = Arguments.of(args, uncached)
        x = next((each for each in tensors if each.dim() == 3), None)
        if x is None or (caches and not learns) or self._context.leaves_alone(x.shape[1], x.shape[1]):
            return self._stages.forward(*args, **kwargs)
        if self._stages.is_looked_at():
            return self._stages.forward(*args, **kwargs)
        call = StagedCall.of(self._stages, arguments, x.device.type)
        with torch.no_grad():
            if not self._is_checked:
                self._stages.check_heads(x, args, uncached)
                self._is_checked = True
            outputs = staged_attention(x, self._heads.num_stages, partial(self._inputs, call, tensors))
            return self._finish(outputs, call, tensors, learns)

    def _inputs(self, call: StagedCall, tensors: list[Tensor]) -> Iterator[StageInputs]:
        """Yield each stage's q, k and v."""
        heads, (args, kwargs) = self._heads, call.arguments.whole(tensors)
        for stage in range(heads.num_stages):
            projections = [partial(_some_rows, own, heads.rows(own, stage)) for own in heads.projections]
            # Under a mode of torch's dispatcher, a checkpoint policy's, autocast does not hold inside an operator.
            with call.autocast():
                inputs = self._stages.inputs(stage, projections, args, kwargs)
            yield inputs
            del inputs  # before the next one is made

    def _finish(self, outputs: StageOutputs, call: StagedCall, tensors: list[Tensor], learns: bool) -> Any:
        """Run the forward to its end, with the out of all heads. Up to the attention it has no graph."""
        undo, reached = ExitStack(), False

        def all_heads(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
            nonlocal reached
            reached = True
            undo.close()
            if not learns:
                return outputs.out
            torch.set_grad_enabled(True)  # until the forward has returned
            return attach(call, outputs, tensors)

        nothing = [partial(_nothing, own.out_features // self._heads.num_stages) for own in self._heads.projections]
        args, kwargs = call.arguments.whole(tensors)
        with undo:
            undo.enter_context(self._stages.running(nothing, HeadStage(operator=all_heads)))
            found = self._stages.forward(*args, **kwargs)
        if not reached:
            self._stages.refuse_unreached()
        if (num_tensors := sum(isinstance(each, Tensor) for each in tree_leaves(found))) != 1:
            self._stages.refuse_output(num_tensors)
        return found


def _some_rows(projection: nn.Linear, rows: slice, x: Tensor) -> Tensor:
    return F.linear(x, projection.weight[rows], None if projection.bias is None else projection.bias[rows])


def _nothing(num_rows: int, x: Tensor) -> Tensor:
    """Return what nobody should read, in the shape of a stage, without memory of its own: who reads it has nan."""
    return x.new_full((), torch.nan).expand(*x.shape[:-1], num_rows)
