"""Rotary embeddings whose frequencies follow the largest position of their input: every rank's follow that of all ranks.

Hugging Face's types "dynamic" and "longrope" choose the frequencies of all tokens by the largest position they are given, and a shard has
another one than the whole. So each rank gets the whole's as one token more, which is cut off the result again.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, cat, nn, stack

from lightning_sp import comm
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.errors import SequenceParallelError


def wrap_rotary(model: nn.Module, context: SequenceContext, undo: ExitStack) -> None:
    """Make each such rotary embedding of a model follow the largest position of all ranks. `undo` takes that back."""
    for module in model.modules():
        if any("dynamic" in each or each == "longrope" for each in _rope_types(module)):
            _wrap(module, context, undo)


def _rope_types(module: nn.Module) -> list[str]:
    """Return a module's types: one, or one for each kind of layer. The module spells them one way, whatever the config does."""
    types = getattr(module, "rope_type", None)
    return [each for each in (types.values() if isinstance(types, dict) else [types]) if isinstance(each, str)]


def _wrap(rope: Any, context: SequenceContext, undo: ExitStack) -> None:
    original = rope.forward

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        step = context.step
        if step is None:
            return original(x, position_ids, *args, **kwargs)
        # Over the ranks of its loss: those of all samples in training, of this group's in evaluation.
        largest = comm.largest(position_ids.max(), step.loss_group)
        _check_memory(rope, context, step, largest)
        longer = cat([position_ids, largest.expand(*position_ids.shape[:-1], 1)], -1)
        tokens = longer.shape[-1]
        return apply_to_collection(
            original(x, longer, *args, **kwargs), Tensor, lambda output: _without_last(output, tokens, rope)
        )

    own = vars(rope).get("forward")
    rope.forward = forward
    undo.callback(setattr, rope, "forward", own) if own else undo.callback(vars(rope).pop, "forward", None)


def _without_last(output: Tensor, tokens: int, rope: nn.Module) -> Tensor:
    if output.dim() < 2 or output.shape[-2] != tokens:
        raise SequenceParallelError(
            f"{type(rope).__name__} of rope_type {', '.join(_rope_types(rope))} returns {tuple(output.shape)} for {tokens} positions: it must "
            "be (..., tokens, head dim), or its frequencies would follow the largest position of each rank alone; use another rope_type"
        )
    return output.narrow(-2, 0, tokens - 1)


def _check_memory(rope: Any, context: SequenceContext, step: Step, largest: Tensor) -> None:
    """Refuse evaluation batches of unequal lengths read side by side: the type "dynamic" remembers the longest batch before."""
    remembers = any("dynamic" in each for each in _rope_types(rope))
    if not remembers or step.loss_group is None or context.mesh.data_parallel_size == 1:
        return
    highest, lowest = comm.largest(stack([largest, -largest])).tolist()
    longest, shortest, original = highest + 1, -lowest + 1, rope.original_max_seq_len
    if longest > original and longest != shortest:
        raise SequenceParallelError(
            f"{type(rope).__name__} of rope_type {', '.join(_rope_types(rope))} remembers the longest batch, and the "
            f"{context.mesh.data_parallel_size} data-parallel groups evaluate batches of {shortest} to {longest} positions side by side, beyond "
            f"its {original}: one device would see them one after the other; evaluate batches of one length, or with data_parallel_size=1"
        )
