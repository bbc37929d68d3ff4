"""Queries whose temperature follows their position, as in Llama 4's layers without RoPE: the position in the sequence, not in a shard.

Such a layer counts its tokens by `torch.arange` itself, and scales those from `floor_scale` on (8192). The preflight's crop is shorter, so it
could not show that a shard counts from 0.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_sp.context.step import SequenceContext
from lightning_sp.layout import shard


def wrap_temperature(model: nn.Module, context: SequenceContext, undo: ExitStack) -> None:
    """Make such layers of a model count over the whole sequence. `undo` takes that back."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and hasattr(module, "floor_scale"):
            _wrap(module, context, undo)


def _wrap(layer: Any, context: SequenceContext, undo: ExitStack) -> None:
    original, own = layer.forward, vars(layer).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        if context.step is None or context.mesh.layout.size == 1:
            return original(*args, **kwargs)
        with _GlobalCount(context):
            return original(*args, **kwargs)

    layer.forward = forward
    undo.callback(setattr, layer, "forward", own) if own else undo.callback(vars(layer).pop, "forward", None)


class _GlobalCount(TorchFunctionMode):
    """Answers the first `torch.arange(s)` of a layer, s being this rank's tokens, with their places in the whole sequence."""

    def __init__(self, context: SequenceContext) -> None:
        super().__init__()
        self._context, self._counted = context, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counted: Tensor = function(*args, **(kwargs or {}))
        step = self._context.step
        assert step is not None
        if function is not torch.arange or self._counted or args != (self._context.local_tokens(step.batch),):
            return counted
        # Only the first: what comes behind it is the attention's own.
        self._counted = True
        whole = torch.arange(step.batch.padded_length, device=counted.device, dtype=counted.dtype)
        return shard(whole, step.batch.layout, self._context.mesh.sequence_rank, dim=0)
