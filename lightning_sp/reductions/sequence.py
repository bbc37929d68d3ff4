"""Sums, means and maxima over whole sequences of which every rank has a part; by document where asked.

    sequence_mean = sum over ranks of sum_s mask x / sum over ranks of sum_s mask

Padding of ours never counts. The result is the same on every rank that shares the sequence, and its gradient is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sp.reductions.scope import current_scope
from lightning_sp.reductions.weights import Documents, Tokens, tokens_of


def sequence_sum(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    dim: int = 1,
    documents: Tensor | None = None,
    num_documents: int | None = None,
) -> Tensor:
    """Return the sum over each sequence's tokens, each times its mask.

    Args:
        x: this rank's tokens along `dim`.
        mask: (B, s), bool or weights; None for all tokens.
        dim: of the tokens.
        documents: the number of each token's document, (B, s), -1 for none; then there is a sum for each, as dim 1.
        num_documents: N; None counts them, which waits for the device.

    Shapes: (B, s, ...) -> (B, ...), with documents (B, N, ...). Communicates: one all_reduce of the result, and one in the backward.
    """
    tokens = tokens_of(x, mask, dim, current_scope(), "sequence_sum")
    chosen = None if documents is None else Documents.of(documents, num_documents, tokens)
    return _cast(tokens.add_up(_sums(_weighed(tokens), chosen)), x)


def sequence_mean(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    dim: int = 1,
    documents: Tensor | None = None,
    num_documents: int | None = None,
) -> Tensor:
    """Return the mean over each sequence's tokens, weighed by its mask; 0 where no token counts.

    Args:
        x: as of `sequence_sum`, as the rest.
        mask: likewise.
        dim: likewise.
        documents: likewise.
        num_documents: likewise.

    Shapes: (B, s, ...) -> (B, ...), with documents (B, N, ...). Communicates: two all_reduces, and as many in the backward.
    """
    tokens = tokens_of(x, mask, dim, current_scope(), "sequence_mean")
    chosen = None if documents is None else Documents.of(documents, num_documents, tokens)
    values = _weighed(tokens)
    if not values.is_floating_point():
        values = values.to(torch.get_default_dtype())
    shape = (*values.shape[:2], *[1] * (values.dim() - 2))
    weight = torch.ones(shape, dtype=values.dtype, device=x.device) if tokens.weight is None else tokens.weight
    weight = weight.to(values.dtype).expand(*values.shape[:2], *weight.shape[2:])
    total = tokens.add_up(_sums(values, chosen))
    count = tokens.add_up(_sums(weight, chosen))
    return _cast(total / torch.where(count == 0, torch.ones_like(count), count), x)


def sequence_max(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    dim: int = 1,
    documents: Tensor | None = None,
    num_documents: int | None = None,
) -> Tensor:
    """Return the largest of each sequence's tokens, element by element; -inf where no token counts.

    Its gradient goes to the tokens that have it, in equal parts, as `torch.amax` does.

    Args:
        x: as of `sequence_sum`, as the rest.
        mask: tokens where it is 0 are left out.
        dim: likewise.
        documents: likewise.
        num_documents: likewise.

    Shapes: (B, s, ...) -> (B, ...), with documents (B, N, ...). Communicates: three all_reduces, one in the backward.
    """
    tokens = tokens_of(x, mask, dim, current_scope(), "sequence_max")
    chosen = None if documents is None else Documents.of(documents, num_documents, tokens)
    values = x.movedim(dim % x.dim(), 1)
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(tokens.values.dtype).min
    values = values if x.is_floating_point() else values.to(tokens.values.dtype)
    counts = (
        torch.ones_like(values, dtype=torch.bool) if tokens.weight is None else (tokens.weight != 0).expand_as(values)
    )
    if chosen is not None:
        counts = counts & chosen.inside.view(*chosen.inside.shape, *[1] * (values.dim() - 2))
    hidden = torch.where(counts, values, lowest).detach()
    if chosen is None:
        highest = tokens.largest(hidden.amax(1))
        of_token = highest.unsqueeze(1)
    else:
        start = hidden.new_full((hidden.shape[0], chosen.count, *hidden.shape[2:]), lowest)
        highest = tokens.largest(start.scatter_reduce(1, chosen.index(hidden), hidden, "amax"))
        of_token = highest.gather(1, chosen.index(hidden))
    if not x.is_floating_point():
        return highest
    return highest + _share(tokens, chosen, values, counts & (values == of_token))


def _share(tokens: Tokens, chosen: Documents | None, values: Tensor, ties: Tensor) -> Tensor:
    """Return zeros whose gradient goes to the tied tokens in equal parts."""
    num_ties = tokens.add_up(_sums(ties.to(values.dtype), chosen))
    zeros = torch.nan_to_num(torch.where(ties, values - values.detach(), torch.zeros_like(values)), 0.0)
    return tokens.add_up(_sums(zeros, chosen)) / num_ties.clamp(min=1)


def _weighed(tokens: Tokens) -> Tensor:
    """Return each token's value times its weight."""
    if tokens.weight is None or tokens.weight.dtype == torch.bool:
        return tokens.values
    return tokens.values * tokens.weight


def _sums(values: Tensor, chosen: Documents | None) -> Tensor:
    return values.sum(1) if chosen is None else chosen.sums(values)


def _cast(result: Tensor, x: Tensor) -> Tensor:
    return result.to(x.dtype) if x.is_floating_point() else result
