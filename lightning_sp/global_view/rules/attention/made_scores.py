"""Scores that are made after all: of this rank's queries and all keys, for what a model does to them that the operator does not.

    (B, H, S, T) in the view, (B, H, s, T) on a rank: what one device has, over the number of ranks. Keys are gathered.

From there on they are a tensor of the sequence like any other. What writes to scores, or gives a view of them, writes to what was made and views
that: it is kept, and stands for the scores once it was written to.

    s = q @ k.mT; s[:, 0] = -inf; s.diagonal().fill_(-inf); s.softmax(-1)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.rules.attention.written_attention import Attention, Scores
from lightning_sp.global_view.tensors.copied_views import version_of
from lightning_sp.global_view.tensors.placement import Placement, gathered, part_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.users_line import users_line


def num_scores(x: Scores) -> int:
    """Return how many numbers a rank would have of scores."""
    return math.prod(x.attention.lead) * x.attention.of_queries.storage.local_tokens * x.attention.of_keys.length


def made(x: Scores) -> SequenceTensor:
    """Return scores or weights with what was noted of them. Communicates: as `placement.gathered`, of the keys.

    Raises:
        SequenceParallelError: they are weights that were dropped, and the operator has drawn what it dropped.
    """
    known = x.attention
    if known.used == ["values"]:
        raise SequenceParallelError(
            f"global_view: weights of an attention that were dropped are used beside their product with the values ({users_line()}): what the "
            "operator dropped is not known, and another draw would be another attention; use the weights before their dropout, or no dropout"
        )
    own = known.of_queries.at(len(known.lead))
    keys = gathered(known.keys, known.of_keys.at(known.keys.dim() - 2))
    scores = (known.queries @ keys.transpose(-2, -1)) * known.scale
    scores = _noted(known, scores.to(torch.promote_types(scores.dtype, x.dtype)), own)
    if known.sinks is not None:
        sinks = known.sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    if known.is_shifted:  # beside sinks, with them
        scores = scores - maxima_of(scores, known.is_shifted)
    if known.is_weights:
        scores = scores.softmax(-1)
    if known.sinks is not None and not known.shows_sinks:
        scores = scores[..., :-1]
    if known.used:
        scores = known.used[0]
    elif known.dropout:
        with own.storage.own_draws():
            scores = torch.nn.functional.dropout(scores, known.dropout)
        known.used.append(scores)
    if known.is_averaged:
        scores = scores.mean(-3)
    scores = scores.to(x.dtype).reshape(*x.lead, *scores.shape[-2:])
    return SequenceTensor(scores, own.at(len(x.lead)))


def kept(x: Scores) -> SequenceTensor:
    """Return scores that are made once, to be written to and viewed. Those that are a view show the memory of what they are a view of."""
    if x.numbers is None:
        is_view = x.base is not None and not x.base.is_old
        numbers = _viewed(kept(x.base), x) if x.base is not None and is_view else made(x)
        if x.attention.is_weights and not is_view:
            numbers = SequenceTensor(
                numbers.local.clone(), numbers.placement
            )  # the softmax needs its own for its backward
        x.numbers = numbers, numbers.local, version_of(numbers.local)
    return x.numbers[0]


def written(x: Scores) -> Any:
    """Return what stands for scores that were written to once they were made, or a view of those that were; None for others."""
    if x.numbers is None:
        if x.base is None or x.base.is_old:
            return None
        of_base = written(x.base)
        if of_base is None and x.base.attention is not x.of_base:
            of_base = x.base
        return None if of_base is None else _viewed(of_base, x)
    numbers, local, version = x.numbers
    return None if numbers.local is local and version_of(local) == version else numbers


def _viewed(numbers: SequenceTensor | Scores, x: Scores) -> Any:
    return numbers.view(*x.lead, *numbers.shape[-2:])


def maxima_of(scores: Tensor, taken: str) -> Tensor:
    """Return the largest of each query, with the gradient that it was taken with: by max, amax or none ("detach")."""
    if taken == "max":
        return scores.max(-1, keepdim=True).values
    return (scores.detach() if taken == "detach" else scores).amax(-1, keepdim=True)


def _noted(known: Attention, scores: Tensor, own: Placement) -> Tensor:
    """Return scores with masks and biases: what comes later is added to the number that hides a key."""

    def part(whole: Any) -> Any:
        is_cut = whole is not None and whole.shape[-2] != 1
        return part_of(whole, own.at(whole.dim() - 2)) if is_cut else whole

    lowered, bias, visible, factor = (part(each) for each in (known.lowered, known.bias, known.visible, known.factor))
    if known.softcap is not None:
        scores = scores.tanh() * known.softcap
    if lowered is not None:
        scores = scores.masked_fill(lowered, known.lowest)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return scores if factor is None else scores * factor
