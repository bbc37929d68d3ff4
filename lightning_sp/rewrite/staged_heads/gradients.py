"""The backward of an attention module in stages: each stage's q, k and v are made again, and give way before the next one's.

x (B, s, E) is any tensor that the module was given; W a projection's weight, of which a stage has some rows.

    dx = sum over stages of dx_stage          dW[rows of a stage] = dW_stage
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_sp.attention.spec.accumulator import accumulator_dtype
from lightning_sp.attention.staged import ExchangedStage, StageOutputs, stage_heads
from lightning_sp.rewrite.staged_heads.stages import Arguments, Stages

# Tokens whose products are made at a time where they are summed in another dtype.
_AT_A_TIME = 1024


@dataclass(frozen=True, kw_only=True)
class StagedCall:
    """One call of a module in stages, but for its tensors.

    Args:
        stages: of the module.
        arguments: what it was given.
        autocast: enters what autocast was in the forward, without its cache of casts, which would hold each stage's.
    """

    stages: Stages
    arguments: Arguments
    autocast: Callable[[], AbstractContextManager[Any]]

    @classmethod
    def of(cls, stages: Stages, arguments: Arguments, device_type: str) -> StagedCall:
        """Return the call that is in progress."""
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        autocast = partial(torch.autocast, device_type, dtype=dtype, enabled=enabled, cache_enabled=False)
        return cls(stages=stages, arguments=arguments, autocast=autocast)


def attach(call: StagedCall, outputs: StageOutputs, tensors: Sequence[Tensor]) -> Tensor:
    """Return the out of all heads, with the graph that makes the stages again.

    Args:
        call: of the module.
        outputs: of its stages.
        tensors: that the module was given.
    """
    parameters = _parameters(call.stages)
    out: Tensor = _StagedOut.apply(call, len(tensors), *outputs, *tensors, *parameters)  # type: ignore[no-untyped-call]
    return out


def _parameters(stages: Stages) -> list[nn.Parameter]:
    """Return the parameters that q, k and v are made with: those of the projections, and those of what each head has alike."""
    heads = stages.heads
    return [each for own in (*heads.projections, *heads.others) for each in own.parameters()]


class _StagedOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: StagedCall, num_tensors: int, out: Tensor, lse: Tensor, visible: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Parameters are the module's: FSDP gathers them again.
        ctx.save_for_backward(out, lse, visible, *tensors[:num_tensors])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needs, call = ctx.needs_input_grad, ctx.call
        if grad is None:
            return (None,) * len(needs)
        out, lse, visible, *tensors = ctx.saved_tensors
        first = len(needs) - len(tensors) - len(_parameters(call.stages))
        leaves = [
            each.detach().requires_grad_(own)
            for each, own in zip(tensors, needs[first : first + len(tensors)], strict=True)
        ]
        backward = _Backward(call, StageOutputs(out, lse, visible), leaves)
        for stage in range(call.stages.heads.num_stages):
            backward.add(stage, grad)
        return (None,) * first + tuple(backward.gradients())


class _Backward:
    """The sums of a backward over the stages; a class because each stage adds to them.

    Args:
        call: of the module.
        outputs: of all stages.
        leaves: the tensors that the module was given, of which some want a gradient.
    """

    def __init__(self, call: StagedCall, outputs: StageOutputs, leaves: list[Tensor]) -> None:
        self._call, self._outputs, self._leaves = call, outputs, leaves
        heads = call.stages.heads
        self._split = [each for own in heads.projections for each in own.parameters()]
        self._shared = [each for own in heads.others for each in own.parameters()]
        self._of_rows: list[Tensor | None] = [None] * len(self._split)
        self._sums: list[Tensor | None] = [None] * (len(leaves) + len(self._shared))
        self._places = {id(leaf): place for place, leaf in enumerate(leaves) if leaf.requires_grad}

    def add(self, stage: int, grad: Tensor) -> None:
        """Add a stage's gradients. Shapes: grad (B, H, s, D)."""
        heads, (out, lse, visible) = self._call.stages.heads, self._outputs
        own, rows = stage_heads(out, stage, heads.num_stages), self._rows(stage)
        exchanged, edges = self._exchange(stage, rows)
        made = exchanged.gradients(out[:, own], lse[stage], visible[stage], grad[:, own])
        asked = [*self._leaves, *self._shared, *rows]
        wanted = [each for each in asked if each.requires_grad]
        pairs = [(edge, each) for edge, each in zip(edges, made, strict=True) if edge is not None]
        outputs, given = [edge for edge, _ in pairs], [each for _, each in pairs]
        found = iter(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
        grads = [next(found) if each.requires_grad else None for each in asked]
        self._add_sums(grads[: len(self._sums)])
        self._lay_rows(stage, grads[len(self._sums) :])

    def gradients(self) -> list[Tensor | None]:
        """Return those of the leaves and of the parameters, in the order of `attach`."""
        likes = [*self._leaves, *self._shared]
        sums = [None if s is None else s.to(like.dtype) for s, like in zip(self._sums, likes, strict=True)]
        num_leaves = len(self._leaves)
        return [*sums[:num_leaves], *self._of_rows, *sums[num_leaves:]]

    def _exchange(self, stage: int, rows: Sequence[Tensor]) -> tuple[ExchangedStage, list[GradientEdge | None]]:
        """Make a stage's q, k and v again and exchange them; return them with what differentiates them."""
        stages, given = self._call.stages, iter(rows)
        projections = [
            partial(self._project, next(given), None if own.bias is None else next(given))
            for own in stages.heads.projections
        ]
        with torch.enable_grad(), self._call.autocast():
            inputs = stages.inputs(stage, projections, *self._call.arguments.whole(self._leaves))
        qkv = inputs[:3]
        edges = [get_gradient_edge(each) if each.requires_grad else None for each in qkv]
        # The graph needs q, k and v themselves no more: without Ulysses they are what is saved.
        q, k, v = (each.detach() for each in qkv)
        return ExchangedStage.of(inputs._replace(q=q, k=k, v=v)), edges

    def _rows(self, stage: int) -> list[Tensor]:
        """Return a stage's rows of the projections' parameters, as leaves: of a slice the gradient would be as large as the whole."""
        heads = self._call.stages.heads
        return [
            each.detach()[heads.rows(own, stage)].requires_grad_(each.requires_grad)
            for own in heads.projections
            for each in own.parameters()
        ]

    def _lay_rows(self, stage: int, grads: Sequence[Tensor | None]) -> None:
        heads = self._call.stages.heads
        owners = [own for own in heads.projections for _ in own.parameters()]
        for number, (own, grad, whole) in enumerate(zip(owners, grads, self._split, strict=True)):
            if grad is None:
                continue
            laid = self._of_rows[number]
            if laid is None:
                self._of_rows[number] = laid = torch.zeros_like(whole)
            laid[heads.rows(own, stage)] = grad

    def _project(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        place = self._places.get(id(x))
        if place is None:
            return F.linear(x, weight, bias)
        out: Tensor = _Projection.apply(partial(self._add_product, place), x, weight, bias)  # type: ignore[no-untyped-call]
        return out

    def _add_product(self, place: int, grad: Tensor, weight: Tensor) -> None:
        """Add to the sum of a leaf what comes of its projection, in place. Shapes: (..., rows), (rows, E) -> (..., E)."""
        whole = self._sums[place]
        if whole is None:
            leaf = self._leaves[place]
            whole = self._sums[place] = torch.zeros(leaf.shape, dtype=accumulator_dtype(leaf.dtype), device=leaf.device)
        into, grad = whole.view(-1, whole.shape[-1]), grad.reshape(-1, grad.shape[-1])
        if into.dtype == grad.dtype:
            into.addmm_(grad, weight)
            return
        for part, of_part in zip(torch.split(into, _AT_A_TIME), torch.split(grad, _AT_A_TIME), strict=True):
            part += of_part @ weight.to(grad.dtype)

    def _add_sums(self, grads: Sequence[Tensor | None]) -> None:
        for number, grad in enumerate(grads):
            if grad is None:
                continue
            before = self._sums[number]
            if before is None:
                # A copy: autograd may give one tensor for two.
                self._sums[number] = grad.to(accumulator_dtype(grad.dtype), copy=True)
            else:
                before += grad


class _Projection(torch.autograd.Function):
    """`F.linear` whose gradient of x is added where that of all stages is: by itself it would be as large for each projection of each stage."""

    @staticmethod
    def forward(
        ctx: Any, add: Callable[[Tensor, Tensor], None], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.add = add
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, _, of_weight, of_bias = ctx.needs_input_grad
        ctx.add(grad, weight)
        rows = grad.reshape(-1, grad.shape[-1])
        dw = (rows.T @ x.reshape(-1, x.shape[-1]).to(grad.dtype)).to(weight.dtype) if of_weight else None
        return None, None, dw, rows.sum(0).to(weight.dtype) if of_bias else None
