"""From each rank's sum and count to one mean over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.loss.output_head.deferred_logits import DeferredLogits
from lightning_sp.loss.output_head.part_functions import CountedRows, LossOfRows

CrossEntropy = Callable[..., Tensor]
_TORCHS = F.cross_entropy  # during a step it is another


def reduce_loss(total: Tensor, count: Tensor, group: ProcessGroup | None, reduction: str = "mean") -> Tensor:
    """Return the mean (or sum) over ranks from each rank's sum and count of tokens.

    Communicates: one all_reduce of two numbers. A mean over a count of zero is nan, as torch's.
    """
    both = comm.sum_over_ranks(torch.stack([total, count.to(total.dtype)]), group)
    return both[0] if reduction == "sum" else mean_over(both[0], both[1].detach())


def mean_over(total: Tensor, count: Tensor) -> Tensor:
    """Return a sum divided by its count. Where that is zero it is nan with a gradient of zeros: torch's mean over ignored targets is both."""
    return torch.where(count == 0, torch.nan, total / nonzero_count(count))


def nonzero_count(count: Tensor) -> Tensor:
    """Return the count as a divisor, 1 where it is zero, of which no gradient may become nan. Class weights may add up to less than 1."""
    return torch.where(count == 0, torch.ones_like(count), count)


def sum_and_count(
    original: CrossEntropy,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum over targets, in float32 or more, and what their mean divides by: a bfloat16 sum over a long shard would lose digits.

    Args:
        original: torch's function, with what it takes besides.
        input: logits or log-probabilities.
        target: class indices, or class probabilities, which count as one each.
        weight: of the classes.
        ignore_index: of class indices.
        real: of class probabilities, which count; None for all.
    """
    dtype = torch.promote_types(input.dtype, torch.float32)
    if isinstance(input, DeferredLogits) and not can_wait(input, target, weight):
        input = input.make()
    if target.is_floating_point():
        shape = [size for dim, size in enumerate(target.shape) if dim != min(1, target.dim() - 1)]
        valid = (
            torch.ones(shape, dtype=torch.bool, device=input.device)
            if real is None
            else real.to(input.device).view(shape)
        )
        count = valid.sum()
    else:
        valid = target != ignore_index
        count = valid.sum() if weight is None else weight[target.masked_fill(~valid, 0)].masked_fill(~valid, 0).sum()
    losses = LossOfRows(original, weight, ignore_index)
    if isinstance(input, DeferredLogits):
        total = input.cross_entropy(rows_of(target), ignore_index) if _is_plain(original, target, weight) else None
        if total is None:
            total = input.summed(CountedRows(losses), rows_of(target), valid.flatten())
        return total.to(dtype), count.to(dtype)
    each = losses(input, target)
    if target.is_floating_point():
        each = torch.where(valid, each, torch.zeros_like(each))
    return each.to(dtype).sum(), count.to(dtype)


def losses_of_tokens(losses: CrossEntropy, input: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """Return the loss of each token, of logits that may be deferred."""
    if not isinstance(input, DeferredLogits) or not can_wait(input, target, weight):
        return losses(input, target)
    dims = (*input.shape[:1], *input.shape[2:]) if input.class_dim == 1 else input.shape[:-1]
    return input.each_token(losses, rows_of(target)).view(dims)


def can_wait(logits: DeferredLogits, target: Tensor, weight: Tensor | None) -> bool:
    """Return whether a cross entropy of deferred logits is one of each token's logits, and only they have a gradient."""
    if logits.is_final:
        return False
    is_of_tokens = logits.ndim == (2 if logits.class_dim == -1 else 3)
    return is_of_tokens and not target.requires_grad and (weight is None or not weight.requires_grad)


def rows_of(target: Tensor) -> Tensor:
    """Return the targets of tokens. Shapes: (...) -> (n,); class probabilities (n, V) or (B, V, s) -> (n, V)."""
    if not target.is_floating_point():
        return target.reshape(-1)
    return target.movedim(1, -1).flatten(0, -2)


def _is_plain(original: CrossEntropy, target: Tensor, weight: Tensor | None) -> bool:
    """Return whether a function is torch's cross entropy of classes, without an option."""
    function, options = (original.func, original.keywords) if isinstance(original, partial) else (original, {})
    return function is _TORCHS and not any(options.values()) and weight is None and not target.is_floating_point()


def mean_of_returned_sum(
    output: Any, loss_group: ProcessGroup | None, *, is_filler: bool = False
) -> tuple[Any, list[Tensor] | None]:
    """Return a step's output with a returned sum and count made into the mean, and the counts if it had them.

    Args:
        output: what training_step returned: a tensor, or a mapping with "loss" and perhaps "num_tokens" (then "loss" is a local sum).
        loss_group: the ranks whose tokens make up the mean.
        is_filler: none of this rank's count.
    """
    if not isinstance(output, Mapping) or "num_tokens" not in output:
        return output, None
    count = torch.as_tensor(output["num_tokens"], device=output["loss"].device).to(output["loss"].dtype)
    loss = output["loss"]
    if is_filler:
        loss, count = loss * 0.0, torch.zeros_like(count)
    total_count = comm.reduce_sum(count, loss_group)
    return {**output, "loss": reduce_loss(loss, count, loss_group)}, [total_count]
