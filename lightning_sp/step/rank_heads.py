"""The heads of attention that each rank has, which Ulysses divides further: the model's, by tensor parallelism's part of them."""

from __future__ import annotations

from typing import cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_sp import comm
from lightning_sp.config import StrategyConfig
from lightning_sp.parallelize import check_split, parameter_layout
from lightning_sp.rewrite.query_heads import named_kv_heads, named_query_heads, tried_query_heads
from lightning_sp.step.isolation.snapshot import isolated

# The attribute of a module whose query heads a forward without data has shown.
_TRIED_HEADS = "_lightning_sp_tried_heads"
# Of a module whether each rank has heads of its own, by tensor parallelism.
_HEADS_ARE_SPLIT = "_lightning_sp_heads_are_split"


def heads_of_rank(
    module: nn.Module, config: StrategyConfig, sequence_parallel_size: int, device: torch.device
) -> tuple[int | None, int | None]:
    """Return the query and key-value heads of a rank, None where they are not known. Every rank must call it, before the model is sharded.

    Communicates: one broadcast of the number of heads where no module names it.

    Raises:
        SequenceParallelError: tensor parallelism does not divide the heads, or cannot split the model.
    """
    heads, kv_heads = _query_heads(module, config, sequence_parallel_size, device), named_kv_heads(module)
    tensor = config.tensor_parallel_size
    if tensor == 1:
        return heads, kv_heads
    if parameter_layout(module) is None:
        of_model = {"query": heads, "key-value": kv_heads}
        given = {kind: number for kind, number in of_model.items() if number is not None}
        setattr(module, _HEADS_ARE_SPLIT, check_split(module, config.tensor_parallel_plan, tensor, given))
    if not vars(module).get(_HEADS_ARE_SPLIT):
        return heads, kv_heads
    return heads and heads // tensor, kv_heads and kv_heads // tensor


def _query_heads(
    module: nn.Module, config: StrategyConfig, sequence_parallel_size: int, device: torch.device
) -> int | None:
    """Return what limits Ulysses: the heads that the model names, or those that reach attention in a forward without data."""
    heads = named_query_heads(module)
    if heads is not None or sequence_parallel_size == 1:
        return heads
    found: tuple[int | None, str] = (None, "")
    if _TRIED_HEADS in vars(module):  # by an earlier Trainer: a sharded model cannot be tried
        return cast(int | None, vars(module)[_TRIED_HEADS])
    if comm.rank_in(comm.world()) == 0:
        with isolated(module, device):
            found = tried_query_heads(module)
    heads, reason = comm.broadcast_object(found, None)
    setattr(module, _TRIED_HEADS, heads)
    if heads is None and (config.ulysses_size, config.ring_size) == ("auto", "auto"):
        rank_zero_info(
            f"sequence_parallel: how many heads the model has is not known ({reason}), so the sequence is split by ring alone, which serves "
            "any number; ulysses_size chooses otherwise"
        )
    return heads
