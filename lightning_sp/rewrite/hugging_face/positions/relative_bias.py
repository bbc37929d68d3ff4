"""T5's bias of relative positions, which its attention makes for the queries and keys that it is given: made for the whole sequence instead.

Every module of Hugging Face's T5 family that makes one has `compute_bias(query_length, key_length, ...)`. Its cross attention has none, and
would add a matrix of zeros: one zero does as well.
Source: T5, arXiv:1910.10683, section 2.1.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from lightning_sp.context.step import SequenceContext
from lightning_sp.rewrite.hugging_face.models import BIAS_ARGUMENTS


def wrap_relative_bias(model: nn.Module, context: SequenceContext, undo: ExitStack) -> None:
    """Make each such module of a model return its bias whole. `undo` takes that back.

    Shapes: (1, H, S, S) instead of (1, H, s, s).
    """
    for module in model.modules():
        if callable(made := getattr(module, "compute_bias", None)):
            assert list(inspect.signature(made).parameters)[:2] == BIAS_ARGUMENTS  # else the model is not rewritten
            _wrap(module, context, undo)
        if _without_bias(module) and _accepts_bias(module):
            undo.callback(module.register_forward_pre_hook(_one_zero(context), with_kwargs=True).remove)


def adds_zeros(module: nn.Module) -> bool:
    """Return whether an attention adds a matrix of zeros to its scores that it makes itself (UMT5's cross attention)."""
    return _without_bias(module) and not _accepts_bias(module)


def _without_bias(module: nn.Module) -> bool:
    return getattr(module, "has_relative_attention_bias", True) is False


def _accepts_bias(module: nn.Module) -> bool:
    return "position_bias" in inspect.signature(module.forward).parameters


def _one_zero(context: SequenceContext) -> Any:
    def hand_in(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if context.step is not None and kwargs.get("position_bias") is None:
            kwargs["position_bias"] = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)).new_zeros(
                1, 1, 1, 1
            )
        return args, kwargs

    return hand_in


def _wrap(module: Any, context: SequenceContext, undo: ExitStack) -> None:
    original = module.compute_bias

    def compute_bias(query_length: int, key_length: int, *args: Any, **kwargs: Any) -> Tensor:
        if context.step is not None:
            queries, keys = context.sequences(query_length, key_length)
            query_length, key_length = queries.padded_length, keys.padded_length
        bias: Tensor = original(query_length, key_length, *args, **kwargs)
        return bias

    module.compute_bias = compute_bias
    undo.callback(vars(module).pop, "compute_bias", None)
