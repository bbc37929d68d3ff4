"""torch's FSDP2 alone, a sequence a rank: blocks, then the model; "checkpoint" recomputes blocks, "chunked loss" never makes all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from benchmarks.longest.llama import adamw, llama


def checkpoint_fully(block: Any) -> None:
    """Recompute all of a block in the backward."""
    forward = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def build(
    variant: str, problem: dict[str, Any], rank: int, world: int, begin_part: Callable[[str], None]
) -> Callable[[Tensor], Tensor]:
    """Return a step on this rank's own sequence."""
    model = llama(problem, begin_part)
    for block in model.model.layers:
        if "checkpoint" in variant:
            checkpoint_fully(block)
        fully_shard(block)
    if "chunked loss" in variant:
        model.forward = _with_chunked_loss(model)
    fully_shard(model)
    optimizer = adamw(model)

    def step(tokens: Tensor) -> Tensor:
        loss = model(input_ids=tokens[:, :-1], labels=None, shift_labels=tokens[:, 1:].contiguous())
        loss = loss if isinstance(loss, Tensor) else _loss(model, loss.logits, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _loss(model: Any, logits: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model.loss_function(
        logits=logits, labels=None, shift_labels=targets.contiguous(), vocab_size=logits.shape[-1]
    )
    return loss


def _with_chunked_loss(model: Any) -> Callable[..., Tensor]:
    """Return a forward that gives torch's own chunked loss: inside of the forward, for there FSDP2 has gathered the head."""

    def forward(input_ids: Tensor, labels: None, shift_labels: Tensor) -> Tensor:
        hidden = model.model(input_ids=input_ids).last_hidden_state
        return F.linear_cross_entropy(
            hidden.flatten(0, 1), model.lm_head.weight, shift_labels.flatten(), options=torch.nn.LinearCrossEntropyOptions()
        )  # fmt: skip

    return forward
