"""Ulysses written by hand around FSDP2, blocks fully checkpointed: two all-to-alls around torch's attention, and the loss of shards added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AttentionInterface

from benchmarks.longest.contestants.fsdp2 import checkpoint_fully
from benchmarks.longest.llama import adamw, llama


class _Exchange(torch.autograd.Function):
    """Tokens for heads: (1, H, s, D) -> (1, H / world, S, D), or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter: int, gather: int) -> Tensor:
        ctx.dims = scatter, gather
        return _exchange(x, scatter, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        scatter, gather = ctx.dims
        return _exchange(grad, gather, scatter), None, None


def _exchange(x: Tensor, scatter: int, gather: int) -> Tensor:
    world = dist.get_world_size()
    sent = torch.cat([part.contiguous().flatten() for part in x.chunk(world, scatter)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    shape = list(x.shape)
    shape[scatter] //= world
    return torch.cat([part.view(shape) for part in received.chunk(world)], gather)


def _attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    q, k, v = (_Exchange.apply(each, 1, 2) for each in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return _Exchange.apply(out, 2, 1).transpose(1, 2), None


def build(
    variant: str, problem: dict[str, Any], rank: int, world: int, begin_part: Callable[[str], None]
) -> Callable[[Tensor], Tensor]:
    """Return a step on a sequence that all ranks share."""
    return checkpointed_step(_attention, problem, rank, world, begin_part)


def checkpointed_step(
    attention: Any, problem: dict[str, Any], rank: int, world: int, begin_part: Callable[[str], None]
) -> Callable[[Tensor], Tensor]:
    """Return a step of the model with an attention over shards that lie in order, blocks fully checkpointed, under FSDP2."""
    AttentionInterface.register("over_shards", attention)
    model = llama(problem, begin_part)
    model.config._attn_implementation = "over_shards"
    for block in model.model.layers:
        checkpoint_fully(block)
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model)

    def step(tokens: Tensor) -> Tensor:
        length = tokens.shape[1] - 1
        own = slice(rank * length // world, (rank + 1) * length // world)
        positions = torch.arange(own.start, own.stop)[None]
        logits = model(input_ids=tokens[:, :-1][:, own], position_ids=positions).logits
        # FSDP2 averages over the ranks, so the mean of equal shards' means is the whole mean.
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:][:, own].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach() / world
        dist.all_reduce(whole)
        return whole

    return step
