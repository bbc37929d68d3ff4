"""Runs of tokens that see each other both ways: images of Gemma 3, the prefix of PaliGemma.

A model numbers runs by the tokens before (-1: none), or flags those of a single run (0), and its mask function reads the numbers at positions in
the whole sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.rewrite.closures import closure_tensors, rebuild
from lightning_sp.rewrite.hugging_face.models import own_class
from lightning_sp.rewrite.hugging_face.whole_sequence import call_on_whole_sequence, whole_tokens

# Of the modeling files, and the variable of transformers' mask function.
_FUNCTION, _NUMBERS = "get_block_sequence_ids_for_mask", "block_sequence_ids"


def number_runs_of_whole_sequence(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    """Let a model number the runs of the whole sequence; `undo` takes that back."""
    for file in {own_class(each).__module__ for each in model.modules()}:
        names = vars(sys.modules[file])
        if _FUNCTION in names and not isinstance(names[_FUNCTION], partial):
            undo.callback(names.__setitem__, _FUNCTION, names[_FUNCTION])
            names[_FUNCTION] = partial(_numbered, context, names[_FUNCTION])


def with_whole_flags(context: SequenceContext, function: Callable[..., Any], batch: SequenceInfo) -> Callable[..., Any]:
    """Return a mask function that reads the whole sequence's flags where it read those of this rank's tokens.

    Numbers above 0 were counted on a shard and stay: the function is refused then. Communicates: one all_gather of each such tensor.
    """
    if context.mesh.layout.size == 1:
        return function
    local = (batch.rows, context.local_tokens(batch))
    found = [t for n, t in closure_tensors(function).items() if n.endswith(_NUMBERS) and t.shape == local]
    whole = {id(each): whole_tokens(context, batch, each) for each in found}
    flags = {key: each for key, each in whole.items() if int(each.max()) <= 0}
    rebuilt: Callable[..., Any] = rebuild(function, flags)
    return rebuilt


def _numbered(context: SequenceContext, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if context.step is None or context.mesh.layout.size == 1:
        return original(*args, **kwargs)
    return call_on_whole_sequence(context, original, *args, **kwargs)
