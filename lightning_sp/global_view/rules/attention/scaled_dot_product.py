"""torch's own attention, `F.scaled_dot_product_attention`: of the sequence by the operator; of other tokens by what it is made of.

queries, keys and values of the sequence          one attention of Ulysses and ring
the sequence in a dim before: rows, blocks        each attention by itself, on the rank that has it
queries of the sequence, whole keys               this rank's queries; latents, a memory
whole queries, keys of the sequence               a softmax over the ranks' keys; what is pooled so is whole
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sp.global_view.calls.call import MOST_NUMBERS, NO_RULE, Call, Rule, is_sequence, named
from lightning_sp.global_view.exchange.movement import as_tokens, in_order
from lightning_sp.global_view.rules.pointwise import aligned
from lightning_sp.global_view.tensors.placement import broadcast
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


class _Given(NamedTuple):
    """The arguments of torch's function behind queries, keys and values."""

    mask: Any
    dropout: float
    is_causal: bool
    scale: float | None
    is_grouped: bool


def attention(call: Call) -> Any:
    """Attend: torch's own function; of queries, keys and values of the sequence by the operator."""
    q, k, v = (call.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    names = ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False), ("scale", None), ("enable_gqa", False)
    given = _Given(*(call.argument(3 + i, name, default) for i, (name, default) in enumerate(names)))
    if not all(isinstance(each, Tensor) and each.dim() > 1 for each in (q, k, v)):
        return NO_RULE
    of_sequence = [each for each in (q, k, v) if is_sequence(each)]
    if of_sequence and all(each.placement.dim < each.dim() - 2 for each in of_sequence):
        return _by_itself(call, given)
    if len(of_sequence) == 3 and all(each.placement.dim == each.dim() - 2 for each in (q, k, v)):
        return _by_operator(q, k, v, given)
    at_tokens = all(each.placement.dim == each.dim() - 2 for each in of_sequence)
    if not of_sequence or not at_tokens or is_sequence(k) != is_sequence(v):
        return NO_RULE
    return _written(q, k, v, given)


def _by_itself(call: Call, given: _Given) -> Any:
    """Attend within rows or blocks of which each is on one rank."""
    found = aligned(call)
    if found is NO_RULE:
        return NO_RULE
    local, own = found
    with own.storage.own_draws() if given.dropout else nullcontext():
        return SequenceTensor(local.on_locals(), own)


def _by_operator(q: Any, k: Any, v: Any, given: _Given) -> Any:
    q, k, v = (in_order(as_tokens(each)) for each in (q, k, v))
    if any(each.placement.outer * each.placement.inner > 1 for each in (q, k, v)):
        return NO_RULE
    own, other = q.placement, k.placement
    lead = broadcast(q.shape[:-3], k.shape[:-3], v.shape[:-3])

    def four(x: SequenceTensor) -> Tensor:
        local = x.local.expand(*lead, *x.local.shape[-3:])
        return local.reshape(-1, *local.shape[-3:])

    mask = given.mask.whole() if is_sequence(given.mask) else given.mask
    mask = mask[(None,) * (4 - mask.dim())] if isinstance(mask, Tensor) else None
    bias = mask if isinstance(mask, Tensor) and mask.is_floating_point() else None
    visible = mask if isinstance(mask, Tensor) and mask.dtype == torch.bool else None
    out = own.storage.attend(
        four(q), four(k), four(v), queries=own, keys=other, visible=visible, bias=bias,
        scale=given.scale, dropout=given.dropout, causal=given.is_causal, documents=True,
    )  # fmt: skip
    # What the operator gave is saved for its backward, and may be written into on one device.
    return SequenceTensor(out.reshape(*lead, *out.shape[1:]).clone(), own.at(len(lead) + 1))


def _written(q: Any, k: Any, v: Any, given: _Given) -> Any:
    """Attend by products and a softmax, whose rules have the rest: a rank has its queries, or its keys, of all scores."""
    split = q if is_sequence(q) else k
    number = math.prod(broadcast(q.shape[:-2], k.shape[:-2] if not given.is_grouped else q.shape[:-2]))
    number *= q.shape[-2] * k.shape[-2] // split.placement.storage.layout.size
    if number > MOST_NUMBERS:
        return NO_RULE
    if given.is_grouped:
        k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], dim=-3) for each in (k, v))
    scores = (q * (q.shape[-1] ** -0.5 if given.scale is None else given.scale)) @ k.transpose(-2, -1)
    mask = given.mask
    if given.is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    left = None
    if mask is not None and mask.dtype == torch.bool:
        left = mask.any(-1, keepdim=True)  # of a query without a key torch gives 0
        scores = scores.masked_fill(~(mask | ~left), -math.inf)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1)
    if given.dropout:
        weights = torch.nn.functional.dropout(weights, given.dropout)
    out = weights @ v
    return out if left is None else torch.where(left, out, torch.zeros((), dtype=out.dtype, device=out.device))


RULES: dict[str, Rule] = named("scaled_dot_product_attention", attention)
