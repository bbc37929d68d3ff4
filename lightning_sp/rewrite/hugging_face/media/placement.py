"""Tokens of images, videos or sounds that a model places into its text, wherever in the sequence their placeholders lie.

    input_ids       t t <image> <image> | <image> t t t        two ranks of one sequence
    image tokens    0 1 2                                      whole on every rank: the tower runs on whole images
    placed          . . 0 1             | 2 . . .              the r-th placeholder of the batch gets the r-th token

A model counts placeholders on what it is given, and `masked_scatter` takes tokens from the first on: both would be a shard's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import merge, shard
from lightning_sp.rewrite.hugging_face.generation import delete_attribute
from lightning_sp.rewrite.hugging_face.models import own_class

# What a modeling file calls to compare the numbers of placeholders and of tokens, and what it says then.
_CHECK, _DIFFER = "torch_compilable_check", "tokens do not match"
# Methods that place tokens into the text: most models have the first, Idefics 2 and 3 the second.
_PLACING = ("get_placeholder_mask", "inputs_merger")
_PLACEHOLDERS = tuple(f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index"))


def placeholder_ids(models: Sequence[Any]) -> tuple[int, ...]:
    """Return the ids in whose place models put tokens of images, videos or sounds."""
    found = {getattr(model.config, name, None) for model in models for name in _PLACEHOLDERS}
    return tuple(sorted(each for each in found if isinstance(each, int)))


def count_placeholders_of_all_ranks(model: Any, context: SequenceContext, undo: ExitStack) -> bool:
    """Let a model compare its tokens of images with the placeholders of the whole sequence; return whether it has any.

    Args:
        model: the outermost Hugging Face model.
        context: of the step.
        undo: takes it back.
    """
    found = [each for each in model.modules() if any(hasattr(each, name) for name in _PLACING)]
    for each in found:
        if hasattr(each, "get_placeholder_mask") and _features(each.get_placeholder_mask):
            each.get_placeholder_mask = partial(_placeholder_mask, context, each, each.get_placeholder_mask)
            undo.callback(delete_attribute, each, "get_placeholder_mask")
        else:
            leave_checks_to_us(context, each, undo)
    return bool(found)


def place_by_whole_sequence(context: SequenceContext, undo: ExitStack) -> None:
    """Make `masked_scatter` into a step's (rows, tokens, width) take the source's rows by the placeholders of the whole sequence.

    Communicates: one all_gather of a byte for each token, in each call.
    """
    function, method = torch.masked_scatter, Tensor.masked_scatter
    torch.masked_scatter = partial(_masked_scatter, context, function)

    def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        return _masked_scatter(context, method, self, mask, source)

    Tensor.masked_scatter = masked_scatter  # type: ignore[method-assign, assignment]
    undo.callback(setattr, torch, "masked_scatter", function)
    undo.callback(delattr, Tensor, "masked_scatter")


def _placeholder_mask(
    context: SequenceContext, model: Any, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if context.step is None or context.mesh.layout.size == 1:
        return original(*args, **kwargs)
    names = names_of(original)
    if _CHECK not in names:
        return original(*args, **kwargs)
    with patch.dict(names, {_CHECK: lambda *_: None}):
        found = original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    width = given["inputs_embeds"].shape[-1]
    # One mask for each kind, in the order of the arguments, be they given or not.
    features = [given.get(name) for name in _features(original)]
    for mask, tokens in zip(found if isinstance(found, tuple) else (found,), features, strict=False):
        if tokens is None:
            continue
        count = int(comm.reduce_sum(mask[..., 0].sum(), context.mesh.sequence_group))
        if count * width != tokens.numel():
            raise SequenceParallelError(_mismatch(own_class(model).__name__, count, tokens.numel() // width))
    return found


def _mismatch(model: str, num_placeholders: int, num_tokens: int) -> str:
    return (
        f"{model}: the batch has {num_placeholders} placeholders for images, videos or sounds in its text, and {num_tokens} tokens of them "
        "to place: give one placeholder for each"
    )


def _features(get_placeholder_mask: Callable[..., Any]) -> list[str]:
    """Return the arguments that are tokens to place; where a model has none, its forward compares the numbers itself (Gemma 4)."""
    return [name for name in inspect.signature(get_placeholder_mask).parameters if name.endswith("_features")]


def names_of(method: Callable[..., Any]) -> dict[str, Any]:
    """Return the names of a method's file, also of one that was wrapped."""
    found: dict[str, Any] = inspect.unwrap(getattr(method, "__func__", method)).__globals__
    return found


def leave_checks_to_us(context: SequenceContext, model: Any, undo: ExitStack) -> None:
    """Let a forward that compares a shard's placeholders with all tokens run: `masked_scatter` compares those of the whole sequence."""
    original, own = model.forward, vars(model).get("forward")
    names = names_of(original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if context.step is None or context.mesh.layout.size == 1 or _CHECK not in names:
            return original(*args, **kwargs)
        check = names[_CHECK]

        def other(condition: Any, message: Any = "", *more: Any) -> Any:
            text = message() if callable(message) else message
            return None if _DIFFER in str(text) else check(condition, message, *more)

        with patch.dict(names, {_CHECK: other}):
            return original(*args, **kwargs)

    # Its arguments are asked for by name.
    model.forward = wraps(original)(forward)
    if own is None:
        undo.callback(delete_attribute, model, "forward")
    else:
        undo.callback(setattr, model, "forward", own)


def _masked_scatter(
    context: SequenceContext, original: Callable[..., Tensor], self: Tensor, mask: Tensor, source: Tensor
) -> Tensor:
    sequence = sequence_of(context, self) if self.dim() == 3 else None
    if sequence is None or mask.dim() not in (2, 3):
        return original(self, mask, source)
    tokens = mask if mask.dim() == 2 else mask.expand(self.shape)[..., 0]
    whole = _of_all_ranks(context, sequence, tokens)
    width = self.shape[-1]
    count, number = int(whole.sum()), source.numel() // width
    if number < count and number == int(tokens.sum()):  # a shard's own tokens
        return original(self, mask, source)
    if number != count:
        raise SequenceParallelError(_mismatch("the model", count, number))
    return original(self, mask, source.reshape(-1, width).index_select(0, _own(context, sequence, tokens, whole)))


def own_tokens(context: SequenceContext, sequence: SequenceInfo, mask: Tensor) -> Tensor:
    """Return which of all tokens to place are this rank's: their numbers, in the order of its placeholders.

    Args:
        context: of the step.
        sequence: of which this rank has a shard.
        mask: (rows, tokens of the shard), true at placeholders.

    Communicates: one all_gather of a byte for each token.
    """
    return _own(context, sequence, mask, _of_all_ranks(context, sequence, mask))


def _of_all_ranks(context: SequenceContext, sequence: SequenceInfo, mask: Tensor) -> Tensor:
    return merge(comm.gather(mask.to(torch.uint8), context.mesh.sequence_group), sequence.layout, dim=1)


def _own(context: SequenceContext, sequence: SequenceInfo, mask: Tensor, whole: Tensor) -> Tensor:
    numbers = (whole.flatten().cumsum(0, dtype=torch.int64) - 1).view(whole.shape)
    return shard(numbers, sequence.layout, context.mesh.sequence_rank, dim=1)[mask]


def sequence_of(context: SequenceContext, tensor: Tensor) -> SequenceInfo | None:
    """Return the sequence of which a tensor (rows, tokens, ...) holds this rank's tokens, where ranks share one."""
    if context.step is None or context.mesh.layout.size == 1:
        return None
    return next(
        (s for s in context.step.batch.sequences if tensor.shape[:2] == (s.rows, context.local_tokens(s))), None
    )
