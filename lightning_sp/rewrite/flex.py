"""Interception of FlexAttention: its mask and score functions are given global positions, whatever part of the sequence a rank holds.

A `BlockMask` may be made for the whole sequence: then its blocks and its function are the mask. Or for this rank's part, as a model makes one
that does not know of the others: then its function is the mask, and its blocks may say no more than that does. What the function holds must be
of the whole sequence (`captured`). On the CPU torch's own has no backward; ours has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from lightning_sp import comm
from lightning_sp.attention.spec.block_mask import BlockTable
from lightning_sp.attention.spec.documents import document_ids
from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.attention.spec.score_mod import MaskMod
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.closures import check_whole_tensors, closure_tensors, learned_score_mod, of_real_tokens
from lightning_sp.rewrite.rebind import rebind
from lightning_sp.rewrite.reference import whole_attention, whole_positions
from lightning_sp.rewrite.sdpa import attend


class FlexInterception(AbstractContextManager[None]):
    """Makes `flex_attention` the sequence-parallel one while the context has a step in progress.

    A class because it holds what it replaces until it is put back.
    """

    def __init__(self, context: SequenceContext, module: nn.Module) -> None:
        self.context, self.module = context, module
        self._undo = ExitStack()

    def __enter__(self) -> None:
        original = torch_flex.flex_attention
        torch_flex.flex_attention = self._instead_of(original)
        self._undo.callback(setattr, torch_flex, "flex_attention", original)
        rebind(self.module, original, self._instead_of, self._undo)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _instead_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def attention(*args: Any, **kwargs: Any) -> Any:
            return self._attention(original, *args, **kwargs)

        # Never traced: it makes functions out of the user's, which the operator knows by number.
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
        if context.step is None and context.reference is None:
            return original(
                query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, **others
            )
        _check(query, key, enable_gqa, {"return_lse": return_lse, "kernel_options": kernel_options, **others})
        found = context.sequences(query.shape[2], key.shape[2]) if context.step is not None else None
        change = None if score_mod is None else learned_score_mod(score_mod, query, found)
        if context.step is None or found is None:
            assert context.reference is not None
            # Torch cuts a block mask that was made for more tokens than there are; of one for fewer the comparison would say nothing.
            whole = None if block_mask is None else MaskMod(block_mask.mask_mod, BlockTable.of(block_mask))
            if whole is not None and whole.table is not None and not whole.table.covers(query.shape[2], key.shape[2]):
                raise SequenceParallelError(
                    f"flex_attention with a BlockMask of {whole.table.lengths} queries and keys on {query.shape[2]} and {key.shape[2]}: "
                    "it must have been made for as many or more"
                )
            seen = _whole_mask(context.reference, whole, query, key)
            return whole_attention(query, key, value, seen, scale=scale, score_mod=change)
        asked = block_mask.mask_mod if block_mask is not None else None
        for what, function in (("score_mod", score_mod), ("mask_mod", asked)):
            if function is not None:
                check_whole_tensors(context, function, f"flex_attention's {what}")
        mask_mod = None
        if block_mask is not None:
            _check_lengths(block_mask, context, *found)
            mask_mod = _mask_mod(block_mask, context, query, *found)
        mask = replace(context.step.mask(*found, causal=False), mask_mod=mask_mod)
        return attend(context, query, key, value, mask=mask, scale=scale, score_mod=change)


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
    """Return a block mask as a mask of the whole sequence, None where it lets everything be seen."""
    alone = block_mask.mask_mod is torch_flex.noop_mask  # without a function the blocks are the mask
    if alone and block_mask.sparsity() == 0:
        return None
    function = of_real_tokens(block_mask.mask_mod, queries, keys)
    made = zip(block_mask.seq_lengths, (queries, keys), strict=True)
    if all(tokens in (each.length, each.padded_length) for tokens, each in made):
        return MaskMod(function, BlockTable.of(block_mask))
    if alone:
        raise SequenceParallelError(
            f"flex_attention with a BlockMask of {tuple(block_mask.seq_lengths)} queries and keys, {block_mask.sparsity():.1f}% hidden blocks "
            f"and no mask_mod, where the sequence has {keys.length} tokens: which places of that it hides is known by a function alone; "
            "make it by create_block_mask(mask_mod, ...), give from_kv_blocks its mask_mod, or make it for the whole sequence"
        )
    # What a rank's blocks say may be of its own tokens: all ranks hear of it.
    try:
        wrong = _wrong_block(block_mask, query)
    except Exception as error:  # whatever a user's function may raise
        wrong = f"flex_attention's BlockMask: {type(error).__name__}: {error}"
    comm.agree(wrong, context.mesh.sequence_group)
    return MaskMod(function)


# For which rows, heads and versions of what it holds: the layers of a model share a block mask, and may differ in heads or write it anew.
_right: WeakKeyDictionary[BlockMask, tuple[int, ...]] = WeakKeyDictionary()


def _wrong_block(block_mask: BlockMask, query: Tensor) -> str | None:
    """Return what is wrong with a block mask of a shard whose blocks are not those of its function: what they hide of the sequence nobody knows.

    A model that routes queries to blocks of keys makes such ones. Block of queries by block of queries, for little memory.
    """
    lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    held = [each for each in (*lists, *closure_tensors(block_mask.mask_mod).values()) if each is not None]
    # Tensors of inference mode have no version to tell a change by.
    known = not any(each.is_inference() for each in held)
    looked_at = (query.shape[0], query.shape[1], *(each._version for each in held)) if known else None
    if known and _right.get(block_mask) == looked_at:
        return None
    table, device = BlockTable.of(block_mask), block_mask.kv_indices.device
    function = MaskMod(block_mask.mask_mod)
    keys = torch.arange(table.lengths[1], device=device)
    for start in range(0, table.lengths[0], table.size[0]):
        queries = torch.arange(start, min(start + table.size[0], table.lengths[0]), device=device)
        # Of the attention's own rows and heads: lists of one stand for all, its function may tell them apart.
        places = ScorePositions((0, query.shape[0]), (0, query.shape[1]), queries, keys)
        asked, whole = table.of_places(places)
        seen = function.seen(places)
        wrong = (seen & ~(asked | whole)) | (~seen & whole)
        if bool(wrong.any()):
            row, head, at, key = wrong.nonzero()[0].tolist()
            said = "seen" if bool(seen.expand_as(wrong)[row, head, at, key]) else "hidden"
            return (
                f"flex_attention with a BlockMask of {table.lengths} queries and keys, this rank's, whose blocks are not those of its "
                f"mask_mod: the function says {said} for query {start + at} and key {key} in row {row} and head {head}, its blocks otherwise. "
                "Where the blocks are chosen by hand, or by the model, make it for the whole sequence"
            )
    if looked_at is not None:
        _right[block_mask] = looked_at
    return None


def _check_lengths(block_mask: BlockMask, context: SequenceContext, queries: SequenceInfo, keys: SequenceInfo) -> None:
    for made, sequence in zip(block_mask.seq_lengths, (queries, keys), strict=True):
        tokens = context.local_tokens(sequence)
        if made not in (tokens, sequence.length, sequence.padded_length):
            raise SequenceParallelError(
                f"flex_attention with a BlockMask of {tuple(block_mask.seq_lengths)} queries and keys, on a sequence of {sequence.length} "
                f"tokens and a shard of {tokens}: it must have been made for one of them"
            )


def _whole_mask(reference: SequenceInfo, mask_mod: MaskMod | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return what a short whole sequence's queries see, within its documents. Shapes: () -> (rows or 1, heads or 1, S, S)."""
    seen = None if mask_mod is None else mask_mod.seen(whole_positions(query, key))
    if reference.boundaries is None:
        return seen
    ids = document_ids(reference.boundaries, reference.length).to(query.device)
    documents = (ids[:, :, None] == ids[:, None, :])[:, None]
    return documents if seen is None else seen & documents
