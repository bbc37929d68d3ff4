"""Losses made of reductions: each runs on whole sequences in plain torch, and on every rank's part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp import reductions as r


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a program reads: whole, or a rank's part. B rows, s tokens, E numbers for each.

    Args:
        x: (B, s, E), differentiable.
        weight: (E,), differentiable, the same on all ranks.
        mask: (B, s), bool.
        weights: (B, s), of tokens.
        position_ids: (B, s).
        labels: (B, s), not shifted.
        of_rows: (B,), of each row; whole on all ranks.
        length: S.
    """

    x: Tensor
    weight: Tensor
    mask: Tensor
    weights: Tensor
    position_ids: Tensor
    labels: Tensor
    of_rows: Tensor
    length: int


def rows(each: Tensor, part: Part) -> Tensor:
    """A loss of each row's numbers, in which no two count alike. Averaged over rows as DDP averages."""
    return (each.flatten(1).sin() * torch.linspace(1, 2, each.flatten(1).shape[1], dtype=each.dtype)).sum(1).mean()


def local(part: Part) -> Tensor:
    """Something of each token, with the shared weight in it."""
    return part.x * part.weight


# ---- over the sequence: a loss of the rows of one data-parallel group


def whole(p: Part) -> Tensor:
    return rows(r.unshard(local(p)), p)


def whole_dim_2(p: Part) -> Tensor:
    return rows(r.unshard(local(p).transpose(1, 2), dim=-1).transpose(1, 2), p)


def whole_and_back(p: Part) -> Tensor:
    centred = r.shard(r.unshard(local(p)).cumsum(1))
    return rows(r.sequence_sum(centred.square()), p)


def shifted(p: Part) -> Tensor:
    return rows(r.sequence_sum(local(p) * r.shift(local(p), 3, 1.0) * r.shift(p.x, -2)), p)


def summed(p: Part) -> Tensor:
    return rows(r.sequence_sum(local(p)), p)


def summed_by_weight(p: Part) -> Tensor:
    return rows(r.sequence_sum(local(p).square(), p.weights), p)


def summed_dim_2(p: Part) -> Tensor:
    return rows(r.sequence_sum(local(p).transpose(1, 2), p.mask, dim=2), p)


def mean(p: Part) -> Tensor:
    return rows(r.sequence_mean(local(p)), p)


def mean_by_mask(p: Part) -> Tensor:
    return rows(r.sequence_mean(local(p), p.mask), p)


def mean_by_weight(p: Part) -> Tensor:
    return rows(r.sequence_mean(local(p), p.weights), p)


def mean_of_documents(p: Part) -> Tensor:
    return rows(r.sequence_mean(local(p), p.mask, documents=r.document_ids(p.position_ids), num_documents=7), p)


def sum_of_documents(p: Part) -> Tensor:
    return rows(r.sequence_sum(local(p), documents=r.document_ids(p.position_ids)), p)


def largest(p: Part) -> Tensor:
    found = r.sequence_max(local(p), p.mask)
    return rows(torch.where(found.isinf(), torch.zeros_like(found), found), p)


def largest_of_ties(p: Part) -> Tensor:
    return rows(r.sequence_max((local(p) * 2).round().detach() * p.weight), p)


def largest_of_documents(p: Part) -> Tensor:
    found = r.sequence_max(local(p), documents=r.document_ids(p.position_ids), num_documents=7)
    return rows(torch.where(found.isinf(), torch.zeros_like(found), found), p)


def last(p: Part) -> Tensor:
    return rows(r.last_token(local(p)), p)


def last_by_mask(p: Part) -> Tensor:
    return rows(r.last_token(local(p), p.mask), p)


def last_of_documents(p: Part) -> Tensor:
    return rows(r.last_token(local(p), documents=r.document_ids(p.position_ids), num_documents=7), p)


def first(p: Part) -> Tensor:
    return rows(r.at_positions(local(p), 0), p)


def at_several(p: Part) -> Tensor:
    places = (torch.arange(3) * 5 + p.of_rows.long()[:, None]) % p.length
    return rows(r.at_positions(local(p), places), p)


def at_one(p: Part) -> Tensor:
    return rows(r.at_positions(local(p).transpose(1, 2), p.of_rows.long() % p.length, dim=2), p)


def normalised(p: Part) -> Tensor:
    """What each token goes on with is of the whole sequence: the cotangents differ between ranks."""
    centred = local(p) - r.sequence_mean(local(p), p.mask).unsqueeze(1)
    scaled = centred / r.sequence_max(centred.abs()).unsqueeze(1)
    return rows(r.sequence_sum(scaled.exp(), p.mask), p)


# ---- over the global batch


def batch_of_tokens(p: Part) -> Tensor:
    return r.batch_mean(local(p).square())


def batch_of_masked_tokens(p: Part) -> Tensor:
    return r.batch_mean(local(p).square(), p.mask)


def batch_of_weighed_tokens(p: Part) -> Tensor:
    return r.batch_mean(local(p).sin().sum(-1), p.weights)


def batch_of_flat_tokens(p: Part) -> Tensor:
    return r.batch_mean(local(p).square().flatten(0, 1), p.mask.flatten())


def batch_of_pairs(p: Part) -> Tensor:
    return r.batch_mean(torch.cat([local(p), p.x]).square()) + r.batch_sum(torch.cat([local(p), p.x]).sin()) / 99


def batch_of_rows(p: Part) -> Tensor:
    return r.batch_mean(r.sequence_mean(local(p), p.mask).sin().sum(-1), p.of_rows)


def batch_sum_of_tokens(p: Part) -> Tensor:
    return r.batch_sum(local(p).sin(), p.mask) / r.batch_sum(p.mask)


def batch_sum_of_all_tokens(p: Part) -> Tensor:
    return r.batch_sum(local(p).sin()) / r.batch_sum(torch.ones_like(p.mask))


def batch_sum_of_rows(p: Part) -> Tensor:
    return r.batch_sum(r.last_token(local(p)).sin()) / r.batch_sum(p.of_rows)


def in_batch_negatives(p: Part) -> Tensor:
    a, b = (F.normalize(r.gather_rows(f(local(p), p.mask)), dim=-1) for f in (r.sequence_mean, r.last_token))
    return F.cross_entropy(a @ b.t() / 0.1, torch.arange(len(a)))


def normalised_by_batch(p: Part) -> Tensor:
    each = r.sequence_sum(local(p)).sum(-1)
    centred = each - r.batch_mean(each)
    return r.batch_mean(centred.square() * centred.exp().clamp(max=3)) + r.batch_mean(
        (p.x.sum(-1) * r.batch_sum(each) / 99).sin()
    )


OF_SEQUENCES = [
    whole, whole_dim_2, whole_and_back, shifted, summed, summed_by_weight, summed_dim_2, mean, mean_by_mask, mean_by_weight, mean_of_documents,
    sum_of_documents,
    largest, largest_of_ties, largest_of_documents, last, last_by_mask, last_of_documents, first, at_several, at_one, normalised,
]  # fmt: skip
OF_BATCHES = [
    batch_of_tokens, batch_of_masked_tokens, batch_of_weighed_tokens, batch_of_flat_tokens, batch_of_rows, batch_of_pairs, batch_sum_of_tokens,
    batch_sum_of_all_tokens, batch_sum_of_rows, in_batch_negatives, normalised_by_batch,
]  # fmt: skip
PROGRAMS = {each.__name__: each for each in (*OF_SEQUENCES, *OF_BATCHES)}
