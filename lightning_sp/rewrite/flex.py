"""Interception of FlexAttention: its mask and score functions get global positions, whatever part of the sequence a rank has.

A `BlockMask` made for the whole sequence is the mask, its blocks and its function together. Of one made for this rank's part, by a model that
does not know of the other ranks, the function is the mask, and its blocks may hide no more than that does. Tensors that the function reads must
be of the whole sequence (`closures`). On the CPU torch's own has no backward; ours has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from lightning_sp import comm
from lightning_sp.attention.reference import dense_attention
from lightning_sp.attention.spec.block_mask import BlockTable
from lightning_sp.attention.spec.documents import document_ids
from lightning_sp.attention.spec.positions import ScorePositions, whole_positions
from lightning_sp.attention.spec.score_mod import MaskMod
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.attention_call import attend
from lightning_sp.rewrite.closures import check_whole_tensors, clamp_to_real_tokens, closure_tensors, learned_score_mod
from lightning_sp.rewrite.rebind import BoundNames


class FlexInterception(AbstractContextManager[None]):
    """Makes `flex_attention` the sequence-parallel one while the context has a step in progress, until it exits."""

    def __init__(self, context: SequenceContext, names: BoundNames) -> None:
        self.context, self._names = context, names
        self._undo = ExitStack()

    def __enter__(self) -> None:
        original = torch_flex.flex_attention
        torch_flex.flex_attention = self._replacement(original)
        self._undo.callback(setattr, torch_flex, "flex_attention", original)
        self._names.rebind(original, self._replacement, self._undo)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _replacement(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def attention(*args: Any, **kwargs: Any) -> Any:
            return self._attention(original, *args, **kwargs)

        # Never traced: it makes functions out of the user's, which the operator finds by their numbers.
        replaced: Callable[..., Any] = torch.compiler.disable(attention)  # type: ignore[no-untyped-call]
        return replaced

    def _attention(
        self,
        original: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor] | None = None,
        block_mask: BlockMask | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        **others: Any,
    ) -> Any:
        context = self.context
        if context.leaves_alone(query.shape[-2], key.shape[-2]) and context.reference is None:
            return original(
                query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, **others
            )
        _check(query, key, enable_gqa, {"return_lse": return_lse, "kernel_options": kernel_options, **others})
        if context.step is None:
            assert context.reference is not None
            context.note_reference_attention(query.shape[2], key.shape[2])
            return _whole_flex_attention(context.reference, query, key, value, score_mod, block_mask, scale)
        if context.head_stage is not None:
            raise SequenceParallelError(
                "stage_inputs='recomputed' in a module that calls flex_attention: its functions are asked for the numbers of heads, and a stage "
                "numbers its own from 0; use stage_inputs='saved'"
            )
        queries, keys = context.sequences(query.shape[2], key.shape[2])
        learned = None if score_mod is None else learned_score_mod(score_mod, query, (queries, keys))
        mask_function = block_mask.mask_mod if block_mask is not None else None
        for what, function in (("score_mod", score_mod), ("mask_mod", mask_function)):
            if function is not None:
                check_whole_tensors(context, function, f"flex_attention's {what}")
        mask_mod = None
        if block_mask is not None:
            _check_lengths(block_mask, context, queries, keys)
            mask_mod = _mask_mod(block_mask, context, query, queries, keys)
        mask = replace(context.step.mask(queries, keys, causal=False), mask_mod=mask_mod)
        return attend(context, query, key, value, mask=mask, scale=scale, score_mod=learned)


def _whole_flex_attention(
    reference: SequenceInfo,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask | None,
    scale: float | None,
) -> Tensor:
    """Return the attention of a short whole batch of the reference run, within its documents. Shapes: as `flex_attention`'s."""
    learned = None if score_mod is None else learned_score_mod(score_mod, query)
    # Torch cuts a block mask that was made for more tokens than there are; of one for fewer the comparison would say nothing.
    mask_mod = None if block_mask is None else MaskMod(block_mask.mask_mod, BlockTable.of(block_mask))
    if mask_mod is not None and mask_mod.table is not None and not mask_mod.table.covers(query.shape[2], key.shape[2]):
        raise SequenceParallelError(
            f"flex_attention with a BlockMask of {mask_mod.table.lengths} queries and keys on {query.shape[2]} and {key.shape[2]}: "
            "it must have been made for as many or more"
        )
    visible = _whole_mask(reference, mask_mod, query, key)
    if visible is None:
        visible = torch.ones((1, 1, query.shape[2], key.shape[2]), dtype=torch.bool, device=query.device)
    return dense_attention(query, key, value, visible, scale, score_mod=learned)


def _check(query: Tensor, key: Tensor, enable_gqa: bool, options: dict[str, Any]) -> None:
    if asked := [f"{name}={value!r}" for name, value in options.items() if value]:
        raise SequenceParallelError(
            f"flex_attention with {', '.join(asked)}: only its output is carried, by kernels of ours; leave that out"
        )
    if query.dim() != 4 or key.dim() != 4:
        raise SequenceParallelError(
            f"flex_attention on {tuple(query.shape)} and {tuple(key.shape)}: must be (batch, heads, tokens, head dim)"
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise SequenceParallelError(
            f"flex_attention of {query.shape[1]} query heads over {key.shape[1]} key-value heads without enable_gqa=True"
        )


def _mask_mod(
    block_mask: BlockMask, context: SequenceContext, query: Tensor, queries: SequenceInfo, keys: SequenceInfo
) -> MaskMod | None:
    """Return a block mask as a mask of the whole sequence, None where it hides nothing."""
    blocks_alone = block_mask.mask_mod is torch_flex.noop_mask  # without a function the blocks are the mask
    if blocks_alone and block_mask.sparsity() == 0:
        return None
    function = clamp_to_real_tokens(block_mask.mask_mod, queries, keys)
    lengths = zip(block_mask.seq_lengths, (queries, keys), strict=True)
    if all(length in (each.length, each.padded_length) for length, each in lengths):
        return MaskMod(function, BlockTable.of(block_mask))
    if blocks_alone:
        raise SequenceParallelError(
            f"flex_attention with a BlockMask of {tuple(block_mask.seq_lengths)} queries and keys, {block_mask.sparsity():.1f}% hidden blocks "
            f"and no mask_mod, where the sequence has {keys.length} tokens: which positions of that it hides only a function can say; "
            "make it by create_block_mask(mask_mod, ...), give from_kv_blocks its mask_mod, or make it for the whole sequence"
        )
    # A rank's blocks may differ from the others': all ranks refuse what one refuses.
    try:
        wrong = _wrong_block(block_mask, query)
    except Exception as error:  # whatever a user's function may raise
        wrong = f"flex_attention's BlockMask: {type(error).__name__}: {error}"
    comm.agree(wrong, context.mesh.sequence_group)
    return MaskMod(function)


# Checked block masks: for how many rows and heads, and which versions of their tensors. The layers of a model share a block mask, and may
# differ in heads or write it anew.
_checked: WeakKeyDictionary[BlockMask, tuple[int, ...]] = WeakKeyDictionary()


def _wrong_block(block_mask: BlockMask, query: Tensor) -> str | None:
    """Return what is wrong with a shard's block mask: its blocks must be those of its function, which alone speaks of other shards.

    A model that routes queries to blocks of keys makes other ones. Compared block of queries by block of queries, for little memory.
    """
    lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    tensors = [each for each in (*lists, *closure_tensors(block_mask.mask_mod).values()) if each is not None]
    # Tensors of inference mode have no version that shows a change.
    versions = None if any(each.is_inference() for each in tensors) else tuple(each._version for each in tensors)
    checked_for = None if versions is None else (query.shape[0], query.shape[1], *versions)
    if checked_for is not None and _checked.get(block_mask) == checked_for:
        return None
    table, device = BlockTable.of(block_mask), block_mask.kv_indices.device
    function = MaskMod(block_mask.mask_mod)
    keys = torch.arange(table.lengths[1], device=device)
    for start in range(0, table.lengths[0], table.size[0]):
        queries = torch.arange(start, min(start + table.size[0], table.lengths[0]), device=device)
        # Of the attention's own rows and heads: lists for one of them count for all, but the function may differ between them.
        positions = ScorePositions((0, query.shape[0]), (0, query.shape[1]), queries, keys)
        partial, full = table.at_positions(positions)
        visible = function.visible(positions)
        wrong = (visible & ~(partial | full)) | (~visible & full)
        if bool(wrong.any()):
            row, head, at, key = wrong.nonzero()[0].tolist()
            said = "visible" if bool(visible.expand_as(wrong)[row, head, at, key]) else "hidden"
            return (
                f"flex_attention with a BlockMask of {table.lengths} queries and keys, this rank's, whose blocks are not those of its "
                f"mask_mod: the function says {said} for query {start + at} and key {key} in row {row} and head {head}, its blocks otherwise. "
                "Where the blocks are chosen by hand, or by the model, make it for the whole sequence"
            )
    if checked_for is not None:
        _checked[block_mask] = checked_for
    return None


def _check_lengths(block_mask: BlockMask, context: SequenceContext, queries: SequenceInfo, keys: SequenceInfo) -> None:
    for length, sequence in zip(block_mask.seq_lengths, (queries, keys), strict=True):
        tokens = context.local_tokens(sequence)
        if length not in (tokens, sequence.length, sequence.padded_length):
            raise SequenceParallelError(
                f"flex_attention with a BlockMask of {tuple(block_mask.seq_lengths)} queries and keys, on a sequence of {sequence.length} "
                f"tokens and a shard of {tokens}: it must have been made for one of them"
            )


def _whole_mask(reference: SequenceInfo, mask_mod: MaskMod | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the keys visible to a short whole sequence's queries, within its documents. Shapes: () -> (rows or 1, heads or 1, S, S)."""
    visible = None if mask_mod is None else mask_mod.visible(whole_positions(query, key))
    if reference.boundaries is None or query.shape[2] != reference.length:
        return visible
    ids = document_ids(reference.boundaries, reference.length).to(query.device)
    documents = (ids[:, :, None] == ids[:, None, :])[:, None]
    return documents if visible is None else visible & documents
