"""T5's bias of distances, which its attention makes for as many queries and keys as it is given: made for the whole sequence instead.

Every module of Hugging Face's T5 family that makes one has `compute_bias(query_length, key_length, ...)`.
Source: T5, arXiv:1910.10683, section 2.1.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from lightning_sp.context import SequenceContext


def bias_of_whole_sequences(model: nn.Module, context: SequenceContext, undo: ExitStack) -> None:
    """Make each such module of a model return its bias whole. `undo` takes that back.

    Shapes: (1, H, S, S) instead of (1, H, s, s).
    """
    for module in model.modules():
        if callable(getattr(module, "compute_bias", None)):
            _wrap(module, context, undo)


def _wrap(module: Any, context: SequenceContext, undo: ExitStack) -> None:
    original = module.compute_bias

    def compute_bias(query_length: int, key_length: int, *args: Any, **kwargs: Any) -> Tensor:
        step = context.step
        if step is not None and query_length == key_length == context.local_length:
            query_length = key_length = step.batch.padded_length
        bias: Tensor = original(query_length, key_length, *args, **kwargs)
        return bias

    module.compute_bias = compute_bias
    undo.callback(vars(module).pop, "compute_bias", None)
