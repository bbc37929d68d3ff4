"""Position embeddings of encoder-decoders that count the tokens they are given: they are handed this rank's places instead.

BART's and its kin's (`forward(input_ids, past_key_values_length=0, position_ids=None)`) count from 0 by their input's length, or are given such
a count by the model, a shard's as if it were the sequence. Nothing else of the model takes positions.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from lightning_sp.context import SequenceContext
from lightning_sp.errors import SequenceParallelError

_COUNTS = {"past_key_values_length", "position_ids"}


def positions_of_shards(model: nn.Module, context: SequenceContext, undo: ExitStack) -> None:
    """Hand each such module of a model the places of its tokens. `undo` takes that back."""
    for module in model.modules():
        if set(inspect.signature(module.forward).parameters) >= _COUNTS:
            undo.callback(module.register_forward_pre_hook(_places(context), with_kwargs=True).remove)


def _places(context: SequenceContext) -> Any:
    def hand_in(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if context.step is None:
            return None
        given: Any = args[0]
        tokens = (given.shape if isinstance(given, Tensor) else given)[1]
        sequence, _ = context.sequences(tokens, tokens)
        if sequence.boundaries is not None:
            raise SequenceParallelError(
                f"{type(module).__name__} counts the places of its tokens itself, alike for all rows, and the batch has packed documents: give "
                "each row one document, or packed_documents=False if attention is to see the whole row"
            )
        places = None if sequence.position_ids is None else sequence.position_ids[0]
        return (given,), {"past_key_values_length": 0, "position_ids": places}

    return hand_in
