"""Functions of logits where a rank has those of its own words alone: each gives what it would give of all words, with exact gradients.

    of each word's logit       on the part                           a softcap, a cast, a temperature
    over the words             some numbers of each token, summed    cross entropy, nll_loss, log_softmax, logsumexp, argmax, gather
    anything else              all words' logits of a chunk, gathered: an opaque `transform`

A function says how it is done on a part by a method `of_part`. What comes of a sum over the ranks is whole: all go on alike. Where it goes back
into a part it is copied first, so that its gradients are summed.

Legend: c tokens of a chunk, v words of this rank, V words of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp.weights.vocabulary_part import VocabularyPart

_CROSS_ENTROPY, _NLL_LOSS = F.cross_entropy, F.nll_loss  # during a step they are others
# From the logits of some tokens, and their rows of other tensors, to something for each of them.
OfRows = Callable[..., Tensor]


@dataclass(frozen=True)
class OfAllWords:
    """A function of the logits (c, V) of all words, where each rank has (c, v): they are gathered, a chunk at a time.

    Args:
        part: which words this rank has.
        before: functions on the part.
        after: functions of all words' logits.
        of_rows: the last one, which takes rows of other tensors, too.
        others: these tensors, (n, ...).
    """

    part: VocabularyPart
    before: Sequence[OfRows]
    after: Sequence[OfRows]
    of_rows: OfRows
    others: tuple[Tensor, ...]

    def __call__(self, logits: Tensor, first: int, last: int) -> Tensor:
        """Communicate: one all_gather of the logits."""
        logits = self.part.gathered(_through(self.before, logits))
        return self.of_rows(_through(self.after, logits), *(rows[first:last] for rows in self.others))


def on_part(
    functions: Sequence[OfRows], of_rows: OfRows, others: tuple[Tensor, ...], part: VocabularyPart
) -> Callable[[Tensor, int, int], Tensor]:
    """Return one function of a part's logits (c, v) for several of all words', of which the last takes rows of other tensors, too."""
    own = [_of_part(each, part) for each in (*functions, of_rows)]
    known: list[OfRows] = []
    for each in own:
        if each is None:
            break
        known.append(each)
    if len(known) <= len(functions):
        return OfAllWords(part, known, list(functions[len(known) :]), of_rows, others)

    def of_tokens(logits: Tensor, first: int, last: int) -> Tensor:
        return known[-1](_through(known[:-1], logits), *(rows[first:last] for rows in others))

    return of_tokens


def _of_part(function: Any, part: VocabularyPart) -> OfRows | None:
    make = getattr(function, "of_part", None)
    found: OfRows | None = None if make is None else make(part)
    return found


def _through(functions: Sequence[OfRows], logits: Tensor) -> Tensor:
    for each in functions:
        logits = each(logits)
    return logits


@dataclass(frozen=True)
class LossOfRows:
    """torch's loss of each token: `F.cross_entropy`, `F.nll_loss`, or another of their arguments.

    Args:
        function: it, with what it takes besides.
        weight: of the classes, (V,).
        ignore_index: of class indices.
    """

    function: Callable[..., Tensor]
    weight: Tensor | None
    ignore_index: int

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return each token's. Shapes: (c, V), (c,) or (c, V) -> (c,)."""
        return self.function(logits, target, weight=self.weight, ignore_index=self.ignore_index, reduction="none")

    def of_part(self, part: VocabularyPart) -> OfRows | None:
        """Return it for a part's logits; None for a loss that is not known."""
        function: Any = self.function
        options: dict[str, Any] = {}
        while isinstance(function, partial):
            options = {**function.keywords, **options}
            function = function.func
        options = {name: value for name, value in options.items() if value is not None}
        smoothing = float(options.pop("label_smoothing", 0.0))
        options.pop("reduction", None)
        if function is _NLL_LOSS and not options and not smoothing:
            return partial(_loss_of_classes, part, self, 0.0, False)
        if function is not _CROSS_ENTROPY or options:
            return None
        return partial(_cross_entropy, part, self, smoothing)


def _cross_entropy(part: VocabularyPart, loss: LossOfRows, smoothing: float, logits: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return _loss_of_probabilities(part, loss, smoothing, logits, target)
    return _loss_of_classes(part, loss, smoothing, True, logits, target)


def _loss_of_classes(
    part: VocabularyPart, loss: LossOfRows, smoothing: float, normalized: bool, logits: Tensor, target: Tensor
) -> Tensor:
    """Return (1 - a) w_y (lse - x_y) + a / V sum_j w_j (lse - x_j) of each token, without lse where logits are log-probabilities."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ignored = target == loss.ignore_index
    place = target.masked_fill(ignored, 0)
    lse = part.logsumexp(wide) if normalized else 0.0
    each = lse - part.chosen(wide, place.unsqueeze(-1)).squeeze(-1)
    if loss.weight is not None:
        each = each * loss.weight.to(wide.dtype)[place]
    if smoothing:
        weights = None if loss.weight is None else loss.weight.to(wide.dtype)
        total = part.total if weights is None else weights.sum()
        of_all = lse * total - part.sum(wide.sum(-1) if weights is None else wide @ part.own(weights))
        each = (1 - smoothing) * each + smoothing / part.total * of_all
    return each.masked_fill(ignored, 0).to(logits.dtype)


def _loss_of_probabilities(
    part: VocabularyPart, loss: LossOfRows, smoothing: float, logits: Tensor, target: Tensor
) -> Tensor:
    """Return sum_j w_j t_j (lse - x_j) of each token. Shapes: (c, v), (c, V) -> (c,)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    coefficients = target.to(wide.dtype)
    if smoothing:
        coefficients = coefficients * (1 - smoothing) + smoothing / part.total
    if loss.weight is not None:
        coefficients = coefficients * loss.weight.to(wide.dtype)
    each = part.logsumexp(wide) * coefficients.sum(-1) - part.sum((wide * part.own(coefficients)).sum(-1))
    return each.to(logits.dtype)


@dataclass(frozen=True)
class CountedRows:
    """Losses of tokens, 0 where one does not count.

    Args:
        losses: gives each token's.
    """

    losses: OfRows

    def __call__(self, logits: Tensor, target: Tensor, counts: Tensor) -> Tensor:
        """Return each token's. Shapes: (c, V), (c, ...), (c,) -> (c,)."""
        each = self.losses(logits, target)
        return torch.where(counts, each, torch.zeros_like(each))

    def of_part(self, part: VocabularyPart) -> OfRows | None:
        """Return it for a part's logits."""
        own = _of_part(self.losses, part)
        return None if own is None else CountedRows(own)


class LogSumExp:
    """The logarithm of the sum of exponents of each token. Shapes: (c, V) -> (c,)."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Return each token's."""
        return logits.logsumexp(-1)

    def of_part(self, part: VocabularyPart) -> OfRows:
        """Return it for a part's logits."""
        return lambda logits: part.logsumexp(_wide(logits)).to(logits.dtype)


class ArgMax:
    """The word of the largest logit of each token. Shapes: (c, V) -> (c,)."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Return each token's."""
        return logits.argmax(-1)

    def of_part(self, part: VocabularyPart) -> OfRows:
        """Return it for a part's logits."""
        return part.argmax


class ChosenWords:
    """The logits of some words of each token. Shapes: (c, V), (c, k) -> (c, k)."""

    def __call__(self, logits: Tensor, words: Tensor) -> Tensor:
        """Return each token's."""
        return logits.gather(-1, words)

    def of_part(self, part: VocabularyPart) -> OfRows:
        """Return it for a part's logits."""
        return part.chosen


def log_softmax_of_part(part: VocabularyPart, logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the part of the logarithms of all words' probabilities. Shapes: (c, v) -> (c, v)."""
    wide = _wide(logits).to(torch.promote_types(dtype, torch.float32))
    return (wide - part.copied(part.logsumexp(wide)).unsqueeze(-1)).to(dtype)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
