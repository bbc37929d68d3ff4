"""Position embeddings of encoder-decoders that count the tokens of their input: they are handed this rank's positions instead.

BART's and its kin's (`forward(input_ids, cache_length=0, position_ids=None)`) count from 0 by their input's length, or are given such a count
by the model, a shard's as if it were the sequence. Nothing else of the model takes positions. M2M-100's and its kin's count by a cumulative sum
over their ids, which `cumulative_sum` makes the whole sequence's.

They are known by what they take. Transformers renamed the count of the tokens that a cache holds in 5.24; models outside it have either name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError

_CACHED = {"cache_length", "past_key_values_length"}
_COUNTED = {"input_ids", "input_ids_shape"}


def pass_positions_to_embeddings(
    model: nn.Module, context: SequenceContext, undo: ExitStack, known: Iterable[nn.Module] = ()
) -> bool:
    """Hand each such module of a model the global positions of its tokens, and return whether it has one. `undo` takes that back.

    One that counts in a way of its own is refused once a step calls it, but in `known` models, which are handed their positions.
    """
    found, inner = False, {each for part in known for each in part.modules()}
    for module in model.modules():
        parameters = _parameters(module)
        if not _CACHED.isdisjoint(parameters):
            if counts := _counts_as_bart(module):
                hook = _positions_hook(context, parameters[0])
            elif _sums_ids(module):
                hook = partial(_grow_table, context)
            elif module in inner:
                continue
            else:
                hook = _refusal_hook(context)
            undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            found = found or counts
    return found


def is_handed_positions(module: nn.Module) -> bool:
    """Return whether a module's positions are made here those of the whole sequence, or refused."""
    return _counts_as_bart(module) or _sums_ids(module)


def _counts_as_bart(module: nn.Module) -> bool:
    parameters = _parameters(module)
    taken = len(parameters) == 3 and parameters[0] in _COUNTED and parameters[1] in _CACHED
    return taken and parameters[2] == "position_ids"


def sums_ids(model: nn.Module) -> bool:
    """Return whether modules of an encoder-decoder count positions by a cumulative sum over their ids."""
    return any(_sums_ids(module) for module in model.modules())


def _sums_ids(module: nn.Module) -> bool:
    counts = hasattr(module, "create_position_ids_from_input_ids") and hasattr(module, "make_weights")
    first, *others = _parameters(module) or [""]
    return counts and first == "input_ids" and set(others) <= {"inputs_embeds", *_CACHED}


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _grow_table(context: SequenceContext, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give the table a row for each position of the whole sequence: the module itself looks at this rank's tokens."""
    if context.step is None or context.mesh.layout.size == 1:
        return
    ids = args[0] if args else kwargs.get("input_ids")
    if ids is None:
        raise _counts_in_its_own_way(module)
    sequence, _ = context.sequences(ids.shape[1], ids.shape[1])
    rows = module.padding_idx + 1 + sequence.length
    if rows > module.weights.size(0):
        module.make_weights(rows + module.offset, module.embedding_dim, module.padding_idx)


def _positions_hook(context: SequenceContext, name: str) -> Any:
    def pass_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if context.step is None:
            return None
        given: Any = args[0] if args else kwargs[name]
        tokens = (given.shape if isinstance(given, Tensor) else given)[1]
        sequence, _ = context.sequences(tokens, tokens)
        if sequence.boundaries is not None:
            raise SequenceParallelError(
                f"{type(module).__name__} counts the positions of its tokens itself, alike for all rows, and the batch has packed documents: "
                "give each row one document, or packed_documents=False if attention is to see the whole row"
            )
        positions = None if sequence.position_ids is None else sequence.position_ids[0]
        return (given, 0, positions), {}

    return pass_positions


def _refusal_hook(context: SequenceContext) -> Any:
    def refuse(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if context.step is not None and context.mesh.layout.size > 1:
            raise _counts_in_its_own_way(module)

    return refuse


def _counts_in_its_own_way(module: nn.Module) -> SequenceParallelError:
    return SequenceParallelError(
        f"{type(module).__name__} counts the positions of its tokens in a way of its own, of this rank's part alone: it cannot be handed "
        "those of the whole sequence; use a model that takes position_ids, or counts as BART does"
    )
