"""Sums and means over the rows of the global batch, and the rows themselves: what makes a loss that of one device on all of them.

    batch_mean = sum over the world of mask x / sum over the world of mask

A mean over the world is the same whether the ranks of a sequence have its tokens or all have the same numbers for its rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.devices import makes_host_wait
from lightning_sp.layout import pad
from lightning_sp.reductions.scope import Scope, current_scope, has_tokens, refuse_together
from lightning_sp.reductions.weights import aligned, sum_dtype

Kind = Literal["tokens", "rows", "unknown"]


def batch_mean(x: Tensor, mask: Tensor | None = None, *, of: Literal["tokens", "rows"] | None = None) -> Tensor:
    """Return the mean over all elements of the global batch, weighed by a mask; 0 where nothing counts.

    Args:
        x: for each row (B, ...), the same on all ranks that share it; or for each token of this rank, (B, s, ...) or (B * s, ...). What has as
            many entries in dim 1 as this rank has tokens is taken for tokens.
        mask: bool or weights, whose dims are the first ones of `x`; None for all.
        of: what the first dims of `x` are of; None tells by their sizes.

    Shapes: (B, ...) -> (). Communicates: one all_reduce of two numbers, and one in the backward; two of 16 bytes where sizes tell.

    Raises:
        SequenceParallelError: `x` looks like tokens, of which some are padding, and is the same on all ranks of a sequence.
    """
    scope = current_scope()
    kind = _kind(x, scope, of)
    _check_kind(x, scope, kind, of, "batch_mean")
    values = x.to(sum_dtype(x))
    values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    values, weight = _weighed(values, mask, scope, kind, "batch_mean")
    total, count = values.sum(), weight.to(values.dtype).expand_as(values).sum()
    if scope is not None:
        scope.step.num_over_groups += 1
        group = scope.step.summed_over
        total, count = comm.sum_over_ranks(torch.stack([total, count]), group).unbind()
    return total / torch.where(count == 0, torch.ones_like(count), count)


def batch_sum(x: Tensor, mask: Tensor | None = None, *, of: Literal["tokens", "rows"] | None = None) -> Tensor:
    """Return the sum over all elements of the global batch, each times its mask.

    Args:
        x: as of `batch_mean`; a number without dims is one of this rank's rows together.
        mask: likewise.
        of: likewise.

    Shapes: (B, ...) -> (). Communicates: one all_reduce of a number, and one in the backward; two of 16 bytes where sizes tell.

    Raises:
        SequenceParallelError: `x` has neither a number for each row nor one for each token, or looks like tokens and is the same on all ranks
            of a sequence.
    """
    scope = current_scope()
    kind = _kind(x, scope, of)
    _check_kind(x, scope, kind, of, "batch_sum")
    values, _ = _weighed(x.to(sum_dtype(x)), mask, scope, kind, "batch_sum")
    total = values.sum()
    if scope is None:
        return total
    scope.step.num_over_groups += 1
    if kind == "tokens" and scope.size > 1:
        return comm.sum_over_ranks(total, scope.step.summed_over)
    return total if scope.data_group is None else comm.sum_over_ranks(total, scope.data_group)


def gather_rows(x: Tensor) -> Tensor:
    """Return the rows of all data-parallel groups, one group's after the other: in-batch negatives, say. On one device: `x`.

    Args:
        x: for each row, the same on all ranks that share it. Groups may have different numbers of rows.

    Shapes: (B, ...) -> (rows of the global batch, ...).
    Communicates: an all_gather of the numbers of rows and one of the rows; one all_to_all in the backward.
    """
    scope = current_scope()
    if scope is None or scope.data_group is None:
        return x
    scope.step.num_over_groups += 1
    # Fillers are sent, for the ranks wait for them, and dropped.
    own = torch.tensor([x.shape[0], 0 if scope.is_filler else x.shape[0]], device=x.device)
    sent, rows = zip(*(each.tolist() for each in comm.gather(own, scope.data_group)), strict=True)
    parts = comm.gather_over_ranks(pad(x, max(sent), dim=0, value=0), scope.data_group)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


def _weighed(x: Tensor, mask: Tensor | None, scope: Scope | None, kind: Kind, function: str) -> tuple[Tensor, Tensor]:
    """Return the values times their weights, and the weights, in a shape that expands to that of the values."""
    weight = (
        torch.ones([1] * x.dim(), dtype=torch.bool, device=x.device) if mask is None else aligned(mask, x, function)
    )
    real = _real_tokens(x, scope) if scope is not None and kind == "tokens" else None
    if real is not None:
        weight = torch.where(real, weight, torch.zeros_like(weight))
    if scope is not None and scope.is_filler:
        weight = torch.zeros_like(weight)
    values = torch.where(weight != 0, x, torch.zeros_like(x))
    return (values if weight.dtype == torch.bool else values * weight), weight


def _real_tokens(x: Tensor, scope: Scope) -> Tensor | None:
    """Return which of a tensor's tokens are no padding of ours; None where it has none."""
    batch = scope.step.batch
    sequence = next(each for each in batch.sequences if has_tokens(x, batch.rows, scope.local_tokens(each)))
    real = scope.real_tokens(sequence, x.device)
    if real is None:
        return None
    if len(real) > 1 and x.shape[0] == batch.rows * len(real):
        return real.repeat(batch.rows).view(-1, *[1] * (x.dim() - 1))
    return real.view(1, -1, *[1] * (x.dim() - 2))


def _kind(x: Tensor, scope: Scope | None, of: Literal["tokens", "rows"] | None) -> Kind:
    """Return what the leading dims of a tensor are of: as told, else by their sizes."""
    if scope is None or x.dim() == 0 or of == "rows":
        return "rows"
    batch = scope.step.batch
    if any(has_tokens(x, batch.rows, scope.local_tokens(each)) for each in batch.sequences):
        return "tokens"
    return "rows" if x.shape[0] == batch.rows and (of is None or scope.size == 1) else "unknown"


def _check_kind(
    x: Tensor, scope: Scope | None, kind: Kind, of: Literal["tokens", "rows"] | None, function: str
) -> None:
    """Refuse on all ranks what would count otherwise than the user means it: other ranks may have a tensor of another size."""
    if scope is None or of == "rows":
        return
    error = None
    if kind == "unknown" and (function == "batch_sum" or of) and (scope.size > 1 or scope.data_group is not None):
        error = (
            f"{function} of a tensor {tuple(x.shape)}: must have a number for each of {scope.step.batch.rows} rows, or for each token of this "
            f"rank, so that none is added twice; leave tokens out by a mask, {function}(x, mask), and not by x[mask]; {function}(x, of='rows') "
            "is of what is the same on all ranks of a sequence, in any number"
        )
    if scope.size == 1 and scope.data_group is not None:
        # Of whole sequences what a group chose by values is its own. What is alike in all groups may be of all their rows.
        alike = comm.are_alike(x, scope.data_group)
        if error and makes_host_wait(x):
            torch._assert_async(~alike, error)
        error = error if error and not makes_host_wait(x) and bool(alike) else None
    if of is None and scope.size > 1 and x.is_floating_point():
        alike = comm.are_alike(x, scope.sequence_group)
        # Of fillers nothing counts, and what is made of targets that are all ignored is alike.
        counts = (
            kind == "tokens" and not scope.is_filler and (function == "batch_sum" or _real_tokens(x, scope) is not None)
        )
        told = (
            f"{function} of a tensor {tuple(x.shape)}: it has as many entries as this rank has tokens, and the same numbers on all "
            f"{scope.size} ranks of the sequence, so it may be of rows; say which: {function}(x, of='rows'), or of='tokens'"
        )
        if makes_host_wait(x):
            # Without waiting for the device.
            torch._assert_async(~alike if counts else torch.ones_like(alike), told)
        elif counts and bool(alike):
            error = told
    # A size is known without asking: on a device the ranks do not wait for each other to say it together.
    refuse_together(error, None if makes_host_wait(x) else scope)
