"""Single tokens of whole sequences, by their global position, on every rank that shares them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.devices import makes_host_wait
from lightning_sp.errors import SequenceParallelError
from lightning_sp.reductions.scope import Scope, current_scope, refuse_together
from lightning_sp.reductions.sequence import sequence_max


def at_positions(x: Tensor, positions: Tensor | int, dim: int = 1) -> Tensor:
    """Return the tokens at global positions, `x.gather` on one device.

    Args:
        x: this rank's tokens along `dim`.
        positions: (B,) for one token of each row, (B, K) for several, or a number for the same one of all; the same on every rank.
        dim: of the tokens.

    Shapes: (B, s, ...), (B,) -> (B, ...); (B, s, ...), (B, K) -> (B, K, ...).
    Communicates: one all_reduce of the result, and one in the backward.

    Raises:
        SequenceParallelError: a position outside of the sequence.
    """
    values = x.movedim(dim % x.dim(), 1)
    if isinstance(positions, int):
        positions = torch.full((values.shape[0],), positions, device=x.device)
    scope = current_scope()
    if scope is not None and scope.size == 1:
        scope = None
    length = values.shape[1] if scope is None else scope.sequence(values, 1, "at_positions").length
    positions = positions.to(x.device)
    if tuple(positions.shape[:1]) != (values.shape[0],) or positions.dim() > 2:
        raise SequenceParallelError(
            f"at_positions: positions {tuple(positions.shape)} for {values.shape[0]} rows: must be (rows,) or (rows, K)"
        )
    _check(positions, length, scope)
    return _take(values, positions, scope)


def last_token(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    dim: int = 1,
    documents: Tensor | None = None,
    num_documents: int | None = None,
) -> Tensor:
    """Return each sequence's last token where the mask is not 0; zeros where it is 0 everywhere.

    Args:
        x: this rank's tokens along `dim`.
        mask: (B, s); None for all tokens.
        dim: of the tokens.
        documents: the number of each token's document, (B, s), -1 for none; then there is a last token of each, as dim 1.
        num_documents: N; None counts them, which waits for the device.

    Shapes: (B, s, ...) -> (B, ...), with documents (B, N, ...).
    Communicates: an all_reduce of positions and one of the result; one in the backward.
    """
    values = x.movedim(dim % x.dim(), 1)
    scope = current_scope()
    if scope is not None and scope.size == 1:
        scope = None
    own = torch.arange(values.shape[1], device=x.device)
    if scope is not None:
        own = scope.positions(scope.sequence(values, 1, "last_token"), x.device)
    last = sequence_max(own.expand(values.shape[0], -1), mask, documents=documents, num_documents=num_documents)
    taken = _take(values, last.clamp(min=0), scope)
    found = (last >= 0).view(*last.shape, *[1] * (taken.dim() - last.dim()))
    return torch.where(found, taken, torch.zeros_like(taken))


def _take(values: Tensor, positions: Tensor, scope: Scope | None) -> Tensor:
    """Return tokens (B, ...) or (B, K, ...) of values (B, s, ...)."""
    index = positions.view(positions.shape[0], -1)
    trailing = values.shape[2:]
    if scope is None:
        taken = values.gather(1, _expanded(index, trailing))
    else:
        sequence = scope.sequence(values, 1, "at_positions")
        own = scope.positions(sequence, values.device)
        slots = torch.full((sequence.padded_length,), -1, device=values.device)
        slots[own] = torch.arange(len(own), device=values.device)
        slot = slots[index]
        local = values.gather(1, _expanded(slot.clamp(min=0), trailing))
        here = (slot >= 0).view(*slot.shape, *[1] * len(trailing))
        taken = comm.sum_over_ranks(torch.where(here, local, torch.zeros_like(local)), scope.sequence_group)
    return taken.view(*positions.shape, *trailing)


def _expanded(index: Tensor, trailing: torch.Size) -> Tensor:
    return index.view(*index.shape, *[1] * len(trailing)).expand(*index.shape, *trailing)


def _check(positions: Tensor, length: int, scope: Scope | None) -> None:
    outside = (positions < 0) | (positions >= length)
    if makes_host_wait(positions):
        # Without waiting for the device.
        torch._assert_async(~outside.any(), f"at_positions: a position outside of 0 to {length - 1}")
        return
    error = f"at_positions: {positions[outside].tolist()[:5]} lie outside of the sequence: must be from 0 to {length - 1}, in whole tokens"
    refuse_together(error if bool(outside.any()) else None, scope)
