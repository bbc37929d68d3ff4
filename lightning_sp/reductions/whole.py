"""From this rank's tokens to whole sequences and back, in global order, without padding; differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sp import comm, layout
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.reductions.scope import current_scope


def unshard(x: Tensor, dim: int = 1) -> Tensor:
    """Return the whole sequences, the same on every rank that shares them. On one device: `x`.

    Args:
        x: this rank's tokens along `dim`.
        dim: of the tokens.

    Shapes: (..., s, ...) -> (..., S, ...). Communicates: one all_gather over the sequence's ranks, in the backward one all_to_all.

    Raises:
        SequenceParallelError: `dim` does not have this rank's tokens.
    """
    if isinstance(x, SequenceTensor):
        return x.whole()
    scope = current_scope()
    if scope is None or scope.size == 1:
        return x
    dim = dim % x.dim()
    sequence = scope.sequence(x, dim, "unshard")
    whole = layout.merge(comm.gather_over_ranks(x, scope.sequence_group), sequence.layout, dim=dim)
    return whole.narrow(dim, 0, sequence.length)


def shard(x: Tensor, dim: int = 1, fill: float | int = 0) -> Tensor:
    """Return this rank's tokens of whole sequences: the way back from `unshard`. On one device: `x`.

    Args:
        x: whole sequences along `dim`, the same on every rank that shares them.
        dim: of the tokens.
        fill: what the tokens of padding get.

    Shapes: (..., S, ...) -> (..., s, ...). Communicates: nothing.

    Raises:
        SequenceParallelError: `dim` does not have the tokens of a whole sequence.
    """
    scope = current_scope()
    if scope is None or scope.size == 1:
        return x
    dim = dim % x.dim()
    sequence = scope.whole_sequence(x, dim, "shard")
    padded = layout.pad(x, sequence.padded_length, dim=dim, value=fill)
    return layout.shard(padded, sequence.layout, scope.mesh.sequence_rank, dim=dim)


def shift(x: Tensor, offset: int = 1, fill: float | int = 0, dim: int = 1) -> Tensor:
    """Return for each token what the token `offset` places later has: `shift(labels, 1, -100)` are next-token targets.

    Args:
        x: this rank's tokens along `dim`.
        offset: how many places; negative looks back.
        fill: what tokens get whose place lies outside of the sequence.
        dim: of the tokens.

    Shapes: (..., s, ...) -> (..., s, ...). Communicates: as `unshard`.
    """
    dim = dim % x.dim()
    whole = unshard(x, dim)
    length = whole.shape[dim]
    moved = min(abs(offset), length)
    shape = list(whole.shape)
    shape[dim] = moved
    missing = whole.new_full(shape, fill)
    if offset >= 0:
        shifted = torch.cat([whole.narrow(dim, moved, length - moved), missing], dim)
    else:
        shifted = torch.cat([missing, whole.narrow(dim, 0, length - moved)], dim)
    return shard(shifted, dim, fill)


def document_ids(position_ids: Tensor) -> Tensor:
    """Return the number of each token's document in its row, from positions that restart: for the `documents` of a reduction.

    Shapes: (B, s) -> (B, s), int64, from 0. Communicates: as `unshard`.
    """
    whole = unshard(position_ids)
    starts = torch.zeros_like(whole, dtype=torch.int64)
    starts[:, 1:] = (whole[:, 1:] != whole[:, :-1] + 1).long()
    return shard(starts.cumsum(1), fill=-1)
