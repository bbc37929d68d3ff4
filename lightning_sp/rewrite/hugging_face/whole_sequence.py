"""This rank's tokens -> those of the whole sequence, for what a model reads off all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.layout import merge


def call_on_whole_sequence(context: SequenceContext, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with every (rows, tokens) of this rank among its arguments made whole, without our padding.

    Args:
        context: with a step in progress.
        original: its signature names its arguments.
        args: of it.
        kwargs: likewise.

    Communicates: one all_gather for each such argument. No gradient flows through them: they are ids and masks.
    """
    assert context.step is not None
    sequence = context.step.batch
    shape = (sequence.rows, context.local_tokens(sequence))
    given = inspect.signature(original).bind(*args, **kwargs)
    for name, value in given.arguments.items():
        if isinstance(value, Tensor) and value.shape == shape:
            given.arguments[name] = whole_tokens(context, sequence, value)
    return original(*given.args, **given.kwargs)


def whole_tokens(context: SequenceContext, sequence: SequenceInfo, tensor: Tensor) -> Tensor:
    """Return a tensor of the whole sequence, without our padding: (rows, tokens of this rank, ...) -> (rows, length, ...)."""
    return merge(comm.gather(tensor, context.mesh.sequence_group), sequence.layout, dim=1)[:, : sequence.length]
