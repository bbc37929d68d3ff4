"""An explicit mask given to an attention inside a step: what it means for the whole sequence, or why that cannot be known.

    keys, queries      T, S or 1     whole: bool is a dense mask, floating point a bias, learned or not
                       t, s or 1     of this rank's tokens: carried where it is the batch's attention_mask, alike for all queries
                       anything else, and what this rank alone knows, is refused

S is the queries' length, padded or not, s this rank's part of it; T and t are those of the keys, of another sequence in cross attention.
Any other mask of this rank's tokens is one of local positions. `ones(s, s).tril()` hides nothing of what it should between ranks, and has the
same numbers as a mask that should not.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp import comm
from lightning_sp.attention import AttentionMask
from lightning_sp.context.masks import build_mask
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError

# What a padding mask adds to a score to hide a key: -inf, the dtype's lowest, or the -1e4 of half precision; exp of it is 0.
_HIDDEN_BELOW = -1e4


def explicit_mask(
    context: SequenceContext, given: Tensor, queries: SequenceInfo, keys: SequenceInfo, what: str = "attn_mask"
) -> tuple[AttentionMask, Tensor | None]:
    """Return the mask and the bias that an explicit mask means for the whole sequence.

    Args:
        context: its step in progress.
        given: bool, True for visible, or floating point, added to the scores.
        queries: the sequence of the attention's queries.
        keys: that of its keys.
        what: its name in errors.

    Shapes: given (S or 1, T), or with rows and heads, or heads, before it.
    Communicates: where it is of this rank's tokens one all_reduce of 8 bytes, once for each tensor.

    Raises:
        SequenceParallelError: it is of this rank's tokens and not the batch's attention_mask, or of another shape.
    """
    step = context.step
    assert step is not None
    if not (given.dtype == torch.bool or given.is_floating_point()) or not 2 <= given.dim() <= 4:
        raise SequenceParallelError(
            f"{what} of shape {tuple(given.shape)}, {given.dtype}: must be bool or floating point, (queries, keys) with rows and heads before"
        )
    mask = given[(None,) * (4 - given.dim())]
    local_queries, local_keys = context.local_tokens(queries), context.local_tokens(keys)
    whole_queries, whole_keys = (queries.length, queries.padded_length), (keys.length, keys.padded_length)
    # The shard of one sequence may be as long as another whole one: then which of them the mask is of is not known.
    ambiguous = context.mesh.layout.size > 1 and local_keys in whole_keys
    if mask.shape[3] in whole_keys and mask.shape[2] in (1, *whole_queries) and not ambiguous:
        plain, mask = (
            build_mask(queries, keys, causal=False),
            _padded(mask, queries, keys, context.mesh.layout.multiple),
        )
        if mask.dtype == torch.bool:
            return replace(plain, dense=mask), None
        return plain, mask
    if mask.shape[3] != local_keys or mask.shape[2] not in (1, local_queries) or local_keys in whole_keys:
        raise SequenceParallelError(_unknown(what, given, queries, keys, local_queries, local_keys))
    if not keys.has_attention_mask or mask.requires_grad:
        raise SequenceParallelError(_of_the_shard(what, given, queries, keys, local_keys))
    if not any(checked is given and version == given._version for checked, version in step.checked_padding_masks):
        # Only a shard's own rank knows its values: all ranks refuse what one refuses.
        refusal = None if _is_padding(mask, keys) else _of_the_shard(what, given, queries, keys, local_keys)
        comm.agree(refusal, step.loss_group)
        step.checked_padding_masks.append((given, given._version))
    return build_mask(queries, keys, causal=False, hides_padding=True), None


def _padded(mask: Tensor, queries: SequenceInfo, keys: SequenceInfo, multiple: int) -> Tensor:
    """Return a whole mask at the padded length, where a sequence is padded by more than the degrees need, to differ from the batch's other."""
    below = queries.padded_length - mask.shape[2] if mask.shape[2] > 1 else 0
    beside = keys.padded_length - mask.shape[3]
    if max(below, beside) < multiple:
        return mask
    # The padding's outputs are thrown away, and the plain mask hides its keys.
    return F.pad(mask, (0, beside, 0, below))


def _is_padding(mask: Tensor, batch: SequenceInfo) -> bool:
    """Return whether a mask hides from every query what the batch's padding mask hides of this rank's keys. Shapes: (B, heads, s or 1, s)."""
    assert batch.attention_mask is not None
    visible = (batch.attention_mask != 0)[:, None, None]
    if mask.shape[0] not in (1, visible.shape[0]):
        return False
    if mask.dtype == torch.bool:
        return bool((mask == visible).all())
    # A row whose keys are all hidden has equal weights if a finite number hides them, and none if -inf does.
    finite = bool(((mask <= _HIDDEN_BELOW) & (mask > -torch.inf)).any())
    if finite and batch.valid is not None and bool((batch.valid[:, 0] == batch.valid[:, 1]).any()):
        return False
    return bool(torch.where(visible, mask == 0, mask <= _HIDDEN_BELOW).all())


def _unknown(
    what: str, given: Tensor, queries: SequenceInfo, keys: SequenceInfo, local_queries: int, local_keys: int
) -> str:
    if queries is keys:
        lengths = f"sequence has {keys.length} tokens and whose shard {local_keys}"
    else:
        lengths = (
            f"sequences have {queries.length} tokens of queries and {keys.length} of keys "
            f"and whose shards {local_queries} and {local_keys}"
        )
    return (
        f"{what} of shape {tuple(given.shape)} inside a step whose {lengths}: which of them it says something of is not known; hand it in "
        f"whole, its last dims (1 or {queries.length}, {keys.length})"
    )


def _of_the_shard(what: str, given: Tensor, queries: SequenceInfo, batch: SequenceInfo, local: int) -> str:
    cause = "" if batch.has_attention_mask else ", and the batch has none"
    return (
        f"{what} of shape {tuple(given.shape)} is of this rank's {local} of {batch.length} tokens: positions in a shard are not those in the "
        "sequence, so that only the batch's attention_mask, alike for all queries, is carried in that form"
        f"{cause}; use is_causal=True for a causal mask, the batch's attention_mask for padding, position_ids that restart at 0 for documents, "
        f"or hand it in whole, its last dims (1 or {queries.length}, {batch.length})"
    )
