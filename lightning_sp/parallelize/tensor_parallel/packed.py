"""A linear layer for several things, of which each rank computes its share of each: its heads' q, k and v, its share of gate and of up.

    W, in order    rank 0: q0 q1    rank 1: k0 k1 v0 v1         as it is stored, sharded and trained: in the model's own order
    exchanged      rank 0: q0 k0 v0    rank 1: q1 k1 v1         for one call, and once more for its backward
    x W            q0 k0 v0            q1 k1 v1                 what the module cuts, each at its own half

Checkpoints, optimizers, norms and whatever a user reads of the weight know nothing of it. Between forward and backward no rank keeps what was
exchanged: it is a part's bytes for each layer, of weights that FSDP2 has freed by then.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_sp import comm

_Parts = tuple[int, ...]


class _PackedLinear(torch.autograd.Function):
    """x W + b of this rank's share of each part. Legend: e inputs, n outputs of a rank, n x e or e x n a weight's shape."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int, parts: _Parts, group: ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.outputs, ctx.parts, ctx.group = outputs, parts, group
        ctx.dtype, ctx.of_bias = dtype_of_call(weight), None if bias is None else bias.dtype
        own_bias = None if bias is None else comm.to_parts(bias.to(dtype_of_call(bias)), 0, parts, group)
        return F.linear(x, _own(weight, ctx.dtype, outputs, parts, group), own_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        outputs, parts, group = ctx.outputs, ctx.parts, ctx.group
        gradient = grad_outputs[0]
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = gradient.matmul(_own(weight, ctx.dtype, outputs, parts, group))
        flat = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            made = flat.mT @ x.flatten(0, -2)
            of_weight = comm.from_parts(made if outputs == 0 else made.mT, outputs, parts, group).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = comm.from_parts(flat.sum(0), 0, parts, group).to(ctx.of_bias)
        return of_x, of_weight, of_bias, None, None, None


def _own(weight: Tensor, dtype: torch.dtype, outputs: int, parts: _Parts, group: ProcessGroup) -> Tensor:
    """Return this rank's share of each part, as F.linear takes it. Shapes: (n, e), or (e, n) with outputs=1 -> (n, e)."""
    own = comm.to_parts(weight.to(dtype), outputs, parts, group)
    return own if outputs == 0 else own.mT


def packed_linear(layer: nn.Module, outputs: int, parts: _Parts, group: ProcessGroup, x: Tensor) -> Tensor:
    """Return this rank's share of each part of a layer's outputs.

    Args:
        layer: an nn.Linear, or transformers' Conv1D, of which this rank has its rows in order.
        outputs: which dim of its weight they are.
        parts: how many outputs each thing has, on all ranks together.
        group: the ranks.
        x: its input, whole.

    Shapes: (..., e) -> (..., n). Communicates: an all_to_all of the weight's bytes in the forward, two in the backward; of a bias one each.
    """
    weight: Any = layer._parameters["weight"]
    if torch.is_autocast_enabled(x.device.type) and x.is_floating_point():
        x = x.to(dtype_of_call(x))
    made: Tensor = _PackedLinear.apply(x, weight, layer._parameters.get("bias"), outputs, parts, group)  # type: ignore[no-untyped-call]
    return made


def dtype_of_call(weight: Tensor) -> torch.dtype:
    """Return the dtype that autocast rounds a weight to: a copy that it makes of a whole one would be saved for the backward."""
    device = weight.device.type
    rounds = torch.is_autocast_enabled(device) and weight.dtype == torch.float32
    return torch.get_autocast_dtype(device) if rounds else weight.dtype


def own_attributes(module: nn.Module, own: Mapping[str, int]) -> dict[str, Any]:
    """Return a module's attributes as a rank has them, made anew of what they are now.

    Args:
        module: around a layer for several things.
        own: numbers of heads and widths by name, those of its config by "config.name"; the config itself is others', too.
    """
    of_config = {name.removeprefix("config."): value for name, value in own.items() if name.startswith("config.")}
    values: dict[str, Any] = {name: value for name, value in own.items() if not name.startswith("config.")}
    if of_config:
        values["config"] = copy.copy(vars(module)["config"])
        vars(values["config"]).update(of_config)
    return values
