"""The masks that a Hugging Face model asks for, as values: each mask function is taken apart into the elementary ones that it joins.

intersection of: causal, full, windows, chunks      -> an interval for each query
                 any other function of positions    -> a mask_mod; it must read nothing of this rank's tokens
                 padding                            -> the batch's own, whole; packed documents are the context's
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.attention.spec.documents import document_ids
from lightning_sp.context.masks import build_mask
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.layout import shard
from lightning_sp.rewrite.closures import check_whole_tensors, clamp_to_real_tokens
from lightning_sp.rewrite.hugging_face.mask_names import mask_name
from lightning_sp.rewrite.hugging_face.media.image_runs import with_whole_flags
from lightning_sp.rewrite.requested_mask import RequestedMask

# Transformers' names of them. Documents come from the whole batch's positions and not from a shard's, so their own functions are skipped.
_CAUSAL, _FULL = "causal_mask_function", "bidirectional_mask_function"
_WINDOW, _BOTH_WAYS = (
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
)
_CHUNKS = "chunked_overlay.<locals>.inner_mask"
_SIZED = (_WINDOW, _BOTH_WAYS, _CHUNKS)
_KNOWN = (_CAUSAL, _FULL, *_SIZED)
_MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_PACKED = ("packed_sequence_mask_function.<locals>.inner_mask",)
_WRAPPERS = ("and_masks.<locals>.and_mask", "remap_positions_for_packed_sequence.<locals>.")


def requested_mask(
    context: SequenceContext, original: Callable[..., Any], implementation: str, *args: Any, **kwargs: Any
) -> Any:
    """Return a mask that the model asks for as a value: transformers' mask interface.

    Args:
        context: with or without a step in progress.
        original: the function called outside of one.
        implementation: of the attention that the model would run on one device.
        args: of the interface.
        kwargs: likewise.

    Communicates: one all_reduce of 8 bytes where the padding hides tokens, or another mask than the batch's reached the model.

    Raises:
        SequenceParallelError: a function that reads tensors of this rank's tokens, or padding that is not the batch's.
    """
    step = context.step
    if step is None:
        return original(*args, **kwargs)
    if isinstance(made := kwargs.get("attention_mask"), RequestedMask):
        return made
    found = _mask_parts(kwargs.get("mask_function"))
    causal = _CAUSAL in [part.name for part in found]
    if _is_of_other_tokens(context, step, int(kwargs["q_length"]), causal=causal):
        return original(*args, **kwargs)
    queries, batch = step.batch, step.batch
    if batch.encoder is not None:
        queries, batch = context.sequences(int(kwargs["q_length"]), int(kwargs["kv_length"]))
    # A window that holds the whole sequence hides nothing.
    parts = [p for p in found if p.size is None or p.size < batch.padded_length]
    padding = kwargs.get("attention_mask")
    hides = padding is not None and _hides_padding(context, batch, padding)
    sizes: dict[str, int] = {}
    functions: list[_MaskFunction] = []
    # Where the model does not get the batch's padding mask, transformers does not count from it.
    origin = _origin(batch) if hides or not batch.has_attention_mask else None
    for part in parts:
        # A window of 0 tokens hides everything: transformers asks for it where no layer uses it.
        if part.size and not sizes and (part.name != _CHUNKS or origin is None):
            sizes[part.name] = part.size
        elif part.name not in (_CAUSAL, _FULL):
            functions.append(_mask_function(context, part, origin, queries, batch))
    if not any(part.name not in _KNOWN for part in parts):
        step.requested_causal.add(causal)
    left, right = sizes.get(_WINDOW), sizes.get(_BOTH_WAYS)
    window = (right, right) if right is not None else (None if left is None else left - 1, None)
    mask = build_mask(
        queries, batch, causal=causal, window_size=window, chunk_size=sizes.get(_CHUNKS), hides_padding=hides
    )
    mask = replace(mask, mask_mod=_all_of(functions)) if functions else mask
    shape = (batch.rows, 1, context.local_tokens(queries), context.local_tokens(batch))
    says_nothing = not sizes and not hides and not functions
    blind = implementation == "eager" and causal and hides and queries is batch and _has_blind_targets(context, batch)
    return RequestedMask(mask, says_nothing=says_nothing, blind_targets=blind, shape=shape)


def _is_of_other_tokens(context: SequenceContext, step: Step, queries: int, *, causal: bool) -> bool:
    """Return whether a mask is made in the step for a tower that runs whole, or for attention to such an encoder's tokens.

    A decoder's attention to its own tokens is causal, and to its encoder's never: their number says nothing, it may be the same.
    """
    if context.unsharded.knows_encoder and not causal:
        return True
    runs_whole = context.unsharded.known or context.mesh.layout.size == 1
    return runs_whole and queries not in {context.local_tokens(each) for each in step.batch.sequences}


def _mask_function(
    context: SequenceContext, part: _MaskPart, origin: Tensor | None, queries: SequenceInfo, batch: SequenceInfo
) -> _MaskFunction:
    """Return a part of a mask as a function of global positions, counted from `origin` where transformers does so.

    Raises:
        SequenceParallelError: it reads tensors of this rank's tokens.
    """
    size = part.size
    if part.name == _CHUNKS and size is not None:
        # Transformers' own reads where the shard's padding ends.
        start = torch.zeros(batch.rows, batch.padded_length, dtype=torch.int64) if origin is None else origin
        start = start.to(_device(batch))
        return lambda row, head, query, key: (query - start[row, query]) // size == (key - start[row, key]) // size
    if part.name in _SIZED and size is None:
        raise SequenceParallelError(
            f"the model asks for a mask made of {part.name} of unknown size: it cannot be carried; without it the model would be silently "
            "wrong. Make the mask by transformers.masking_utils, whose functions tell the size, or set global_view=True"
        )
    function: _MaskFunction = with_whole_flags(context, part.function, batch)
    check_whole_tensors(context, function, f"the model's mask function {part.name}")
    if origin is None or batch.has_attention_mask or part.name in _KNOWN:
        return clamp_to_real_tokens(function, queries, batch)
    start = origin.to(_device(batch))
    return clamp_to_real_tokens(
        lambda row, head, query, key: function(row, head, query - start[row, query], key - start[row, key]),
        queries,
        batch,
    )


def _has_blind_targets(context: SequenceContext, batch: SequenceInfo) -> bool:
    """Return whether a token before a row's first visible one has a target, on any rank of the sequence.

    It sees no key. Eager attention adds the lowest number to all of its scores, and so attends to all tokens alike.
    """
    labels = batch.shift_labels
    if labels is None:
        return False
    first = batch.valid[:, 0] if batch.visible_keys is None and batch.valid is not None else None
    if batch.visible_keys is not None:
        first = batch.visible_keys.long().argmax(1)
    assert first is not None
    places = shard(torch.arange(batch.padded_length), batch.layout, context.mesh.sequence_rank, dim=0).to(labels.device)
    blind = (places < first.to(labels.device)[:, None]) & (labels != IGNORE_INDEX)
    return bool(comm.largest(blind.any().long(), context.mesh.sequence_group))


def _all_of(functions: list[_MaskFunction]) -> _MaskFunction:
    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = functions[0](row, head, query, key)
        for function in functions[1:]:
            visible = visible & function(row, head, query, key)
        return visible

    return mask_mod


def _device(batch: SequenceInfo) -> torch.device:
    """Return where the step computes."""
    return torch.device("cpu") if batch.position_ids is None else batch.position_ids.device


def _origin(batch: SequenceInfo) -> Tensor | None:
    """Return from where each token's position is counted: its document's start, or the first token that is no padding; None for 0.

    Shapes: () -> (rows, S), int64, on the CPU.
    """
    if batch.boundaries is not None and not batch.has_attention_mask and _counts_within_documents():
        starts = batch.boundaries.gather(1, document_ids(batch.boundaries, batch.padded_length))
        return starts.expand(batch.rows, -1)
    if batch.visible_keys is not None:
        first = batch.visible_keys.cpu().long().argmax(1)
    elif batch.valid is not None:
        first = batch.valid[:, 0]
    else:
        return None
    return first[:, None].expand(batch.rows, batch.padded_length) if bool(first.any()) else None


def _counts_within_documents() -> bool:
    """Whether this transformers gives mask functions the positions within a packed document."""
    from transformers import masking_utils  # noqa: PLC0415

    return hasattr(masking_utils, "remap_positions_for_packed_sequence")


def _hides_padding(context: SequenceContext, batch: SequenceInfo, padding: Tensor) -> bool:
    """Return whether the batch's padding hides tokens, which what reached the model must hide too. Every rank of a sequence must call it."""
    assert context.step is not None
    is_untouched = context.step.has_batch_masks or torch.compiler.is_compiling()
    # One that should hide nothing is looked at where it may be another one: that waits for the device.
    if batch.hides_keys or not (batch.has_attention_mask and is_untouched):
        # Only a shard's own rank knows its values: all ranks of the sequence refuse what one refuses. Ranks of other sequences do not take part:
        # their batch may hide nothing.
        comm.agree(_wrong_padding(context, batch, padding), context.mesh.sequence_group)
    return batch.hides_keys


def _wrong_padding(context: SequenceContext, batch: SequenceInfo, padding: Any) -> str | None:
    """Return what is wrong with the padding mask of this rank's tokens that reached the model: it must be the batch's own, known whole.

    Tokens behind the batch's length are hidden whatever it says: one that a model makes of its ids may hide them, too.
    """
    untold, rank = context.untold, context.mesh.sequence_rank
    own = shard(torch.arange(batch.padded_length) < batch.length, batch.layout, rank, dim=0).to(padding.device)
    beyond = ~own if padding.shape[-1:] == own.shape else own.new_zeros(())
    if not batch.hides_keys:
        if bool((padding.bool() | beyond).all()):
            return None
        has = "that of the batch hides none" if batch.has_attention_mask else "the batch has none"
        return (
            f"a padding mask of shape {tuple(padding.shape)} that hides tokens reached the model, and {has}: from a rank's part "
            "alone the whole is not known; give it as the batch's attention_mask (a decoder's as decoder_attention_mask), or use "
            f"global_view=True, in which a step may make it{untold}"
        )
    assert batch.attention_mask is not None
    given = batch.attention_mask
    if padding.shape != given.shape or bool(((padding.bool() != given.bool()) & ~beyond).any()):
        return (
            f"the padding mask of shape {tuple(padding.shape)} that reached the model is not the batch's attention_mask: one made in "
            "training_step cannot be carried on a rank's part; change the batch before it is sharded, or use global_view=True, in which a step "
            f"may make it{untold}"
        )
    return None


@dataclass(frozen=True)
class _MaskPart:
    """An elementary mask function: its name, itself, and the size of its window or chunk."""

    name: str
    function: Any
    size: int | None = None


def _mask_parts(function: Any) -> list[_MaskPart]:
    """Return the elementary masks that a mask function is the intersection of."""
    name = mask_name(function)
    if name in _PACKED:
        return []
    inner: list[Any] = []
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        inner += list(content) if isinstance(content, tuple) else [content]
    if name in _SIZED:
        sizes = [each for each in inner if isinstance(each, int)]
        return [_MaskPart(name, function, sizes[0] if len(sizes) == 1 else None)]
    if not name.startswith(_WRAPPERS):
        return [_MaskPart(name, function)]
    return [each for content in inner if callable(content) for each in _mask_parts(content)]
