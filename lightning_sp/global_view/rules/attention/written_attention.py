"""What is known of an attention that a model writes out, and the masks that the operator is given for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.masks.bands import band_of
from lightning_sp.global_view.tensors.placement import Placement
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor, SequenceTensor
from lightning_sp.global_view.tensors.traced import Metadata, placed_again
from lightning_sp.users_line import users_line

# A number this low hides a key: -inf, a dtype's lowest, or the -1e4 of half precision.
HIDDEN_BELOW = -1e4
# What such a number may become by a scale behind it: the exponential of it is 0 in each dtype.
STILL_HIDDEN_BELOW = -1e3


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention:
    """What is known of an attention so far.

    Args:
        queries: local, (..., s, D).
        keys: local, (..., t, D).
        of_queries: where the queries' sequence is.
        of_keys: likewise the keys'.
        lead: the dims before queries and keys, as finely as they have been shown.
        scale: of the products.
        visible: which keys each query sees, whole, broadcastable to (*lead, S, T); None for all.
        lowered: of which keys a finite number stands in the place of the score, likewise.
        lowest: that number.
        factor: 0 for keys that the next sum hides, 1 for the others, likewise.
        bias: added after the scale, likewise.
        softcap: c of c tanh(score), in the place of the scaled score; None where there is no tanh.
        is_weights: the softmax was taken.
        dropout: the probability.
        is_shifted: how the largest score of each query was taken that was subtracted, max, amax or detach; empty where none was.
        sinks: a score of each head for a key without a value, (H,); None for none.
        shows_sinks: they stand behind the keys, where they are shown.
        is_averaged: the mean of the weights over the last of the dims before is shown, the heads.
        used: what weights that were dropped have been used for, for nobody else draws the same: a product with values, or themselves once made.
    """

    queries: Tensor
    keys: Tensor
    of_queries: Placement
    of_keys: Placement
    lead: tuple[int, ...]
    scale: float = 1.0
    visible: Tensor | None = None
    lowered: Tensor | None = None
    lowest: float = 0.0
    factor: Tensor | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    is_weights: bool = False
    dropout: float = 0.0
    is_shifted: str = ""
    sinks: Tensor | None = None
    shows_sinks: bool = False
    is_averaged: bool = False
    used: list[Any] = field(default_factory=list)


# The tensors of an attention that is noted.
NOTED = ("queries", "keys", "visible", "lowered", "factor", "bias", "sinks")


def tensors_of(known: Attention) -> dict[str, Tensor]:
    """Return the tensors that there are of an attention, by name."""
    found = {name: getattr(known, name) for name in NOTED}
    return {name: each for name, each in found.items() if each is not None}


class ScoresMetadata:
    """What guards compare of scores: all that is noted but numbers of tensors.

    Args:
        attention: what is noted; None in a copy, which guards keep longer than a step.
        kind: what is compared.
        dtype: as it is shown.
    """

    def __init__(self, attention: Attention | None, kind: tuple[Any, ...], dtype: torch.dtype) -> None:
        self.attention, self.kind, self.dtype = attention, kind, dtype

    @classmethod
    def of(cls, scores: Any) -> ScoresMetadata:
        """Return that of scores, or of what is taken from them."""
        known: Attention = scores.attention
        numbers = {each.name: getattr(known, each.name) for each in fields(known) if each.name not in NOTED}
        places = Metadata.of(numbers.pop("of_queries")), Metadata.of(numbers.pop("of_keys"))
        numbers.pop("lead"), numbers.pop("used")
        kind = (
            type(scores),
            scores.dtype,
            *places,
            *numbers.items(),
            *tensors_of(known),
            getattr(scores, "is_old", None),
        )
        return cls(known, kind, scores.dtype)

    def attention_of(self, inner: Mapping[str, Tensor], size: Any) -> Attention:
        """Return what is noted of what a compiler traces. Args: the tensors by name, the size of the scores as it is shown."""
        known = self.attention
        assert known is not None
        tensors = {name.removeprefix("noted_"): each for name, each in inner.items()}
        queries, keys = tensors["queries"], tensors["keys"]
        own = placed_again(queries, Metadata.of(known.of_queries), size[-2])
        other = placed_again(keys, Metadata.of(known.of_keys), size[-1] - known.shows_sinks)
        changes: dict[str, Any] = {**tensors, "lead": tuple(queries.shape[:-2]), "used": [*known.used]}
        return replace(known, of_queries=own, of_keys=other, **changes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScoresMetadata) and self.kind == other.kind

    def __hash__(self) -> int:
        return hash(self.kind)

    def __deepcopy__(self, _: Any) -> ScoresMetadata:
        places = [deepcopy(each) if isinstance(each, Metadata) else each for each in self.kind]
        return ScoresMetadata(None, tuple(places), self.dtype)


class Scores(GlobalTensor):
    """Scores or weights of an attention, of which nothing is computed.

    Args:
        attention: what is known of it.
        lead: the dims before queries and keys, as they are shown.
        dtype: as it is shown.
        base: scores of which these are a view; None for none.
        of_base: what was known of those then.
        is_old: a view of them was written into since.
        numbers: as they were made for what writes to them or views them, and what told then whether anything was written; None if they were not.
    """

    attention: Attention
    lead: tuple[int, ...]
    base: Scores | None = None
    of_base: Attention | None = None
    is_old: bool = False
    numbers: tuple[SequenceTensor, Tensor, Any] | None = None

    @property
    def is_stale(self) -> bool:
        """Whether a view of them, or what they are a view of, was written into since, by what is noted."""
        return self.is_old or (self.base is not None and self.base.attention is not self.of_base)

    @staticmethod
    def __new__(cls, attention: Attention, lead: Sequence[int], dtype: torch.dtype) -> Scores:
        """Return scores of the shape that one device would see."""
        shape = (*lead, attention.of_queries.length, attention.of_keys.length + attention.shows_sinks)
        made = cls.without_memory(shape, dtype, attention.queries.device)
        made.attention, made.lead, made.of_sequence = attention, tuple(lead), attention.of_queries.storage
        return made

    def __tensor_flatten__(self) -> tuple[list[str], ScoresMetadata]:
        """Tell a compiler what these are made of."""
        return [f"noted_{name}" for name in tensors_of(self.attention)], ScoresMetadata.of(self)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], metadata: ScoresMetadata, size: Any, stride: Any) -> Scores:
        """Return what a compiler traces in the place of scores."""
        return Scores(metadata.attention_of(inner, size), tuple(size[:-2]), metadata.dtype)

    @classmethod
    def __metadata_guard__(cls, known: ScoresMetadata, given: ScoresMetadata) -> bool:
        """Return whether scores may take the graph of others."""
        return known == given

    def __getattr__(self, name: str) -> Any:
        """Return a tensor of the attention that is noted."""
        if name.removeprefix("noted_") in NOTED:
            return getattr(self.attention, name.removeprefix("noted_"))
        raise AttributeError(name)

    def changed(self, **changes: Any) -> Scores:
        """Return scores of which more is known."""
        return Scores(replace(self.attention, **changes), self.lead, self.dtype)


class Masks(NamedTuple):
    """What the operator is given of an attention's masks, each whole.

    Args:
        visible: which keys are seen; None for all.
        bias: added to the scores; None for none.
        alike: the queries all of whose keys are hidden by one finite number, (..., S, 1): they weigh all keys alike. None for none.
    """

    visible: Tensor | None
    bias: Tensor | None
    alike: Tensor | None = None


def masks_of(known: Attention) -> Masks:
    """Return the masks. A finite number hides a key as -inf does, where another key is left for the query.

    Where none is left, and one number stands for all scores, all keys are weighed alike. Scores that low numbers were added to are lost in
    rounding, with their log-sum-exp, by which the operator's backward goes.

    Raises:
        SequenceParallelError: none is left, and several numbers hide them, or one that is added.
    """
    if known.lowered is None and known.bias is None:
        return Masks(known.visible, None)
    if known.of_queries.storage.only_shapes:
        return Masks(known.lowered, known.bias)
    lowered = known.lowered
    if lowered is None and known.visible is None and band_of(known.bias) is not None:
        return Masks(None, known.bias)  # each query sees itself
    hidden = [
        each
        for each in (lowered, None if known.bias is None else known.bias.detach() <= HIDDEN_BELOW)
        if each is not None
    ]
    both = hidden[0] if len(hidden) == 1 else hidden[0] | hidden[1]
    seen = ~both if known.visible is None else known.visible & ~both
    left = seen.any(-1, keepdim=True)
    is_alone = lowered is not None and known.visible is None and known.bias is None
    alike = lowered.all(-1, keepdim=True) if lowered is not None and is_alone else torch.zeros_like(left)
    _refuse_where(
        ~(left | alike), known, "numbers that are added, or masks of several numbers, and hide all keys of a query,"
    )
    if lowered is None:
        return Masks(known.visible, known.bias)
    visible = ~lowered if known.visible is None else known.visible & ~lowered
    return Masks(visible | alike, known.bias, alike) if bool(alike.any()) else Masks(visible, known.bias)


def check_ties(known: Attention) -> None:
    """Refuse a maximum with the number that hides, where it hides all keys of a query: each ties with it, and has half of its gradient."""
    low = None if known.bias is None else known.bias.detach() <= HIDDEN_BELOW
    hidden = [
        each for each in (known.lowered, low, None if known.visible is None else ~known.visible) if each is not None
    ]
    both = reduce(torch.logical_or, hidden, torch.zeros(1, dtype=torch.bool))
    what = "numbers that hide all keys of a query, and a maximum with them,"
    known.of_queries.storage.agree(str(refusal(what)) if bool(both.all(-1).any()) else None)


def _refuse_where(found: Tensor, known: Attention, what: str) -> None:
    """Refuse what a mask does to some query: on all ranks of the sequence together, which have other queries."""
    try:
        known.of_queries.storage.agree(str(refusal(what)) if bool(found.any()) else None)
    except SequenceParallelError as error:
        raise NotCarriedError(str(error)) from error


def four_dims(whole: Tensor | None, lead: tuple[int, ...]) -> Tensor | None:
    """Return a mask or bias with two dims before queries and keys."""
    if whole is None or len(lead) == 2:
        return None if whole is None else whole[(None,) * (4 - whole.dim())]
    own = whole.shape[:-2]
    if math.prod(own) not in (1, math.prod(lead)):
        whole = whole.expand(*lead, *whole.shape[-2:])
    return whole.reshape(1, -1, *whole.shape[-2:])


class NotCarriedError(SequenceParallelError):
    """What is done to scores has no place in an attention of the operator; the scores may be made for it."""


def refusal(what: str) -> NotCarriedError:
    """Return the error for what is done to scores and not carried."""
    return NotCarriedError(
        f"global_view: {what} on the scores of an attention that is written out ({users_line()}): carried are a scale, a mask, a bias that is "
        "whole, a softmax over the keys, dropout, and the product with the values; use F.scaled_dot_product_attention for the rest"
    )
