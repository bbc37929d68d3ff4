"""Sums that run along the sequence: within the runs of tokens that a rank has, and before each run the sum of all that lie ahead of it."""

from __future__ import annotations

from typing import Any

import torch

from lightning_sp import comm
from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_sequence, named
from lightning_sp.global_view.exchange.movement import as_tokens, in_order
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


def running_sum(call: Call) -> Any:
    """Sum along the sequence up to each token: one all_gather of the sums of what each rank has."""
    x, dim = call.args[0], call.argument(1, "dim")
    if not is_sequence(x) or not isinstance(dim, int) or dim % x.dim() != x.placement.dim or len(call.args) > 2:
        return NO_RULE
    x = in_order(as_tokens(x))
    if x.placement.outer * x.placement.inner > 1:
        return NO_RULE
    own, storage = x.placement, x.placement.storage
    dtype = call.kwargs.get("dtype") or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    ranges = [storage.layout.ranges(storage.capacity, rank) for rank in range(storage.layout.size)]
    local = own.without_padding(x.local, 0).to(dtype).movedim(own.dim, 0)
    sums = [part.cumsum(0) for part in torch.split(local, [end - start for start, end in ranges[storage.rank]])]
    most = max(map(len, ranges))
    totals = torch.stack([each[-1] for each in sums] + [torch.zeros_like(local[0])] * (most - len(sums)))
    # All of them on every rank, with a factor of 0 for what lies behind: the mirror of the gather is called by all.
    parts = torch.stack(comm.gather_over_ranks(totals, storage.group))[:, :, None]
    firsts = torch.tensor([[start for start, _ in each] + [storage.capacity] * (most - len(each)) for each in ranges])
    begins = torch.tensor([start for start, _ in ranges[storage.rank]])
    is_ahead = (firsts[:, :, None] < begins).view(*firsts.shape, -1, *[1] * (local.dim() - 1)).to(x.device)
    before = torch.where(is_ahead, parts, torch.zeros_like(parts)).sum((0, 1))  # (runs of this rank, ...)
    result = torch.cat([each + before[run] for run, each in enumerate(sums)])
    return SequenceTensor(result.movedim(0, own.dim).contiguous(), own)


RULES: dict[str, Rule] = named("cumsum", running_sum)
