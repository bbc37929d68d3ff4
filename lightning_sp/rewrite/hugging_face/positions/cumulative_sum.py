"""Cumulative sums along the sequence, by which models count positions from their ids or their mask: over the whole sequence, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.context.step import SequenceContext
from lightning_sp.layout import merge, shard


def intercept_cumulative_sums(context: SequenceContext, undo: ExitStack) -> None:
    """Make `torch.cumsum` of a step's (rows, tokens) the whole sequence's. `undo` takes that back.

    A gradient does not flow through it: positions have none. Communicates: one all_gather of what is summed.
    """
    function, method = torch.cumsum, Tensor.cumsum
    torch.cumsum = _intercepted(context, function)
    Tensor.cumsum = _intercepted(context, method)  # type: ignore[method-assign]
    undo.callback(setattr, torch, "cumsum", function)
    undo.callback(delattr, Tensor, "cumsum")


def _intercepted(context: SequenceContext, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def cumsum(input: Tensor, dim: int, *args: Any, **kwargs: Any) -> Tensor:
        step = context.step
        if step is None or input.requires_grad or input.dim() != 2 or dim not in (1, -1):
            return original(input, dim, *args, **kwargs)
        shape = tuple(input.shape)
        batch = next((s for s in step.batch.sequences if shape == (s.rows, context.local_tokens(s))), None)
        if batch is None:
            return original(input, dim, *args, **kwargs)
        whole = merge(comm.gather(input, context.mesh.sequence_group), batch.layout, dim=1)
        counted = original(whole, 1, *args, **kwargs)
        # Our padding stands behind the sequence: it begins anew, so that no position is beyond a model's table.
        counted[:, batch.length :] = 1
        return shard(counted, batch.layout, context.mesh.sequence_rank, dim=1)

    return cumsum
