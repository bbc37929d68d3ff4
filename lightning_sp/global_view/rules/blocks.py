"""A sequence that is viewed as blocks of tokens, as local attention and scans by chunks do: each block goes to one rank, whole.

    (B, S, E)  ->  (B, S / n, n, E)       the sequence is in the dim of blocks; what is done within one is local
    (B, S / n, n, E)  ->  (B, S, E)       each token goes back to where the batch's own are

Each way is one all-to-all. Blocks are spread over the ranks as tokens are, with padding where the degrees do not divide their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_sp.global_view.calls.call import NO_RULE
from lightning_sp.global_view.exchange.movement import moved
from lightning_sp.global_view.tensors.placement import Placement, Storage
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor


def in_blocks(x: SequenceTensor, shape: Sequence[int]) -> Any:
    """Return a tensor in a shape that has blocks of tokens along one dim, the tokens of a block behind it; NO_RULE where it has none."""
    own = x.placement
    before = math.prod(x.shape[: own.dim]) * own.outer
    behind = math.prod(x.shape[own.dim + 1 :]) * own.inner
    found: list[tuple[int, int, int]] = []
    for dim, size in enumerate(shape):
        ahead, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        if after % behind or before % max(1, ahead) or own.length % max(1, after // behind):
            continue
        block = after // behind
        if block > 1 and size == before // ahead * (own.length // block):
            found.append((before // ahead, dim, block))
    if not found:
        return NO_RULE
    outer, dim, block = min(found)
    number = own.length // block
    target = own.storage.of_blocks(number, block)
    flat = _moved(x, target.within_blocks())
    placement = Placement(storage=target, dim=dim, length=number, outer=outer)
    local = list(shape)
    local[dim] = placement.held
    return SequenceTensor(flat.local.reshape(local), placement)


def is_one_block(x: SequenceTensor, given: Sequence[int]) -> bool:
    """Return whether a view names the tokens of a block, and leaves their number, which is 1 for a sequence as short, to be found."""
    own = x.placement
    at = own.dim
    return (
        own.outer * own.inner == 1
        and len(given) > at + 1
        and list(given[: at + 2]) == [*x.shape[:at], -1, own.length]
        and math.prod(given[at + 2 :]) == math.prod(x.shape[at + 1 :])
        and own.length > 1
    )


def joined(x: SequenceTensor) -> SequenceTensor:
    """Return a tensor whose blocks were joined with their tokens, with each token where the batch's own are; others as they are."""
    own = x.placement
    block = own.storage.block
    if not block or own.inner % block:
        return x
    assert own.storage.root is not None
    tokens = replace(
        own, storage=own.storage.within_blocks(), length=own.length * block, inner=own.inner // block, copied=None
    )
    target = own.storage.root.for_length(tokens.length)
    flat = _moved(SequenceTensor(x.local, tokens), target)
    placement = replace(tokens, storage=target)
    local = list(x.local.shape)
    local[own.dim] = placement.held
    return SequenceTensor(flat.local.reshape(local), placement)


def _moved(x: SequenceTensor, target: Storage) -> SequenceTensor:
    """Return the tokens elsewhere. Shapes: (..., L, ...) -> (before, L, behind)."""
    own = x.placement
    before = math.prod(x.shape[: own.dim]) * own.outer
    flat = x.local.reshape(before, own.storage.local_tokens, -1)
    own = Placement(storage=own.storage, dim=1, length=own.length)
    return moved(SequenceTensor(flat, own), torch.arange(own.length), "to other blocks", target)
