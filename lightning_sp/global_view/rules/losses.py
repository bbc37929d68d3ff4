"""Losses that torch computes and adds up in one function: number by number, then the mean or the sum over the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.nn._reduction as legacy
from torch import Tensor

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, named
from lightning_sp.global_view.exchange.movement import brought
from lightning_sp.global_view.rules.pointwise import aligned
from lightning_sp.global_view.tensors.placement import Placement, part_of
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.labels import IGNORE_INDEX, can_be_ignored


def elementwise(call: Call) -> Any:
    """Compute a loss of each number, then reduce."""
    return _reduced(call, 0)


def of_vectors(call: Call) -> Any:
    """Compute a loss of each token's vectors, in the last dim, then reduce."""
    if any(each.placement.dim == each.dim() - 1 for each in call.tensors):
        return NO_RULE
    return _reduced(call, 1)


def _reduced(call: Call, num_gone: int) -> Any:
    """Return a loss whose own function leaves so many of the last dims away."""
    found = aligned(replace(call, kwargs=_unreduced(call.kwargs)))
    if found is NO_RULE:
        return NO_RULE
    local, placement = found
    each = SequenceTensor(local.on_locals(), placement)
    assert each.dim() == max(given.dim() for given in call.tensors) - num_gone
    weight = call.kwargs.get("weight")
    if call.name not in ("mse_loss", "l1_loss"):
        weight = None  # of a mean over how many numbers there are
    return reduced_by(each, call.kwargs, None if weight is None else weight.sum())


def _unreduced(kwargs: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in kwargs.items() if name not in ("size_average", "reduce")}
    return {**rest, "reduction": "none"}


def reduced_by(each: Tensor, kwargs: dict[str, Any], count: Tensor | None = None) -> Tensor:
    """Return losses reduced as the arguments of a loss say.

    Args:
        each: the losses.
        kwargs: of the loss.
        count: what their sum is divided by for a mean; None for how many there are.
    """
    reduction, average, reduce = (kwargs.get(name) for name in ("reduction", "size_average", "reduce"))
    if average is not None or reduce is not None:
        reduction = legacy.legacy_get_string(average, reduce)
    if reduction == "none":
        return each
    total = each.sum()
    if reduction == "sum":
        return total
    return total / (each.shape[0] if reduction == "batchmean" else each.numel() if count is None else count)


def of_classes(call: Call) -> Any:
    """Compute a loss of each token's classes, in dim 1, then reduce."""
    x, target = call.argument(0, "input"), call.argument(1, "target")
    if not isinstance(x, SequenceTensor) or x.dim() != 2 or x.placement.dim != 0 or len(call.args) < 2:
        return NO_RULE
    own = x.placement
    if isinstance(target, SequenceTensor):
        target = brought(target, own.storage)
        if target.placement.dim != 0 or not target.placement.same_tokens(own):
            return NO_RULE
    local = target.local if isinstance(target, SequenceTensor) else part_of(target, own)
    losses = call.function(x.local, local, *call.args[2:], **_unreduced(call.kwargs))
    return reduced_by(SequenceTensor(losses, own), call.kwargs)


def local_targets(input: SequenceTensor, target: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], SequenceTensor]]:
    """Return what a cross entropy is of on this rank, and what shows a loss for each token; targets of padding are ignored.

    Args:
        input: logits or log-probabilities, with the classes in dim 1.
        target: classes; of the sequence, or whole.

    Shapes: (B, V, L) or (B * L, V) shown, (B, L) or (B * L) shown -> (tokens, V), (tokens,); (tokens,) -> as the target.

    Raises:
        SequenceParallelError: classes are where the sequence is, or probabilities are of a part of it.
    """
    own = input.placement
    if own.dim == 1 and input.dim() > 1:
        raise _refusal(input, target, "the classes lie where the sequence is")
    if target.is_floating_point():
        return _probabilities(input, target)
    of_target = own.at(own.dim - (own.dim > 1))
    if isinstance(target, SequenceTensor) and not _fits(target, of_target):
        target = target.whole()
    held = target.local if isinstance(target, SequenceTensor) else part_of(target, of_target)
    shape = held.shape
    held = of_target.without_padding(can_be_ignored(held), IGNORE_INDEX)
    logits = _classes_last(input.local)

    def shown(losses: Tensor) -> SequenceTensor:
        return SequenceTensor(losses.reshape(shape), of_target)

    return logits.reshape(-1, logits.shape[-1]), held.reshape(-1), shown


def _classes_last(local: Tensor) -> Tensor:
    return local if local.dim() == 2 else local.movedim(1, -1)


def _fits(target: SequenceTensor, wanted: Placement) -> bool:
    return target.placement.dim == wanted.dim and target.placement.same_tokens(wanted)


def _probabilities(input: SequenceTensor, target: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], SequenceTensor]]:
    """Return the same of probabilities, which have the shape of the logits."""
    own = input.placement
    if own.length not in (own.storage.sequence.length, own.storage.capacity):
        raise _refusal(input, target, f"the loss is of {own.length} of {own.storage.sequence.length} tokens")
    if isinstance(target, SequenceTensor) and not _fits(target, own):
        target = target.whole()
    held = target.local if isinstance(target, SequenceTensor) else part_of(target, own)
    of_loss = own.at(own.dim - (own.dim > 1))
    shape = [size for dim, size in enumerate(input.local.shape) if dim != 1]

    def shown(losses: Tensor) -> SequenceTensor:
        return SequenceTensor(losses.reshape(shape), of_loss)

    logits, held = _classes_last(input.local), _classes_last(held)
    return logits.reshape(-1, logits.shape[-1]), held.reshape(-1, logits.shape[-1]), shown


def _refusal(input: SequenceTensor, target: Tensor, why: str) -> SequenceParallelError:
    return SequenceParallelError(
        f"global_view: a cross entropy of {tuple(input.shape)} over targets {tuple(target.shape)}, {target.dtype}: {why}; for probabilities "
        "write -(target * logits.log_softmax(-1)).sum(-1).mean(), and put classes into dim 1 or into the last of two"
    )


_OF_NUMBERS = """
    mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss soft_margin_loss
    margin_ranking_loss hinge_embedding_loss
"""
RULES: dict[str, Rule] = {
    **named(_OF_NUMBERS, elementwise),
    **named("triplet_margin_loss", of_vectors),
    **named("multi_margin_loss multilabel_margin_loss", of_classes),
}
