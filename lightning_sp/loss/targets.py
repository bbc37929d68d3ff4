"""What the targets of a cross entropy are: this rank's tokens, those of one row, or one for each row; told by their number.

A mean over tokens adds up all ranks' tokens. A tensor with one number for each row must be the same on all ranks of a sequence: made by a
reduction. A shard's own pooled head looks alike, so the ranks compare the loss.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.tensors.placement import Placement
from lightning_sp.loss.selection import ATTENTION, OVER_RANKS, is_part, may_be_chosen

Kind = Literal["tokens", "row", "rows", "shifted", "unknown"]

POOLED = (
    "from lightning_sp.reductions import last_token, sequence_mean; pooled = sequence_mean(x, mask), or last_token(x, mask), in place of "
    "x.mean(1) or x[:, -1]; or use global_view=True, in which these are of the whole sequence"
)


def kind_in_global_view(target: Tensor, context: SequenceContext, placement: Placement | None) -> Kind:
    """Return what the targets of a loss in the global view are of: there a tensor tells which of the batch's sequences it is of.

    Args:
        target: of the loss: this rank's tokens, or whole where there is no placement.
        context: with a step in progress.
        placement: of the loss' input, if that is of a sequence.
    """
    step, count = context.loss_step, count_of_targets(target)
    assert step is not None
    batch = step.batch
    if placement is None:
        # One row's, whole; or what all ranks of the sequence have alike.
        of_a_row = batch.rows > 1 and count != batch.rows and count in {each.length for each in batch.all_sequences}
        return "row" if of_a_row else "rows"
    # Tokens that were chosen, or blocks of them, have a storage of their own: those of all rows may lie one after the other.
    is_row = placement.storage.root is None and count == placement.storage.local_tokens * placement.inner
    return "row" if is_row and batch.rows > 1 else "tokens"


def kind_of_targets(input: Tensor, target: Tensor, context: SequenceContext, name: str) -> Kind:
    """Return what the targets are of. Every rank must call it.

    Args:
        input: of the loss.
        target: of the loss: class indices or probabilities.
        context: with a step in progress.
        name: of the loss, for errors.

    Communicates: one all_reduce of 16 bytes over the sequence's ranks where targets may have been chosen by their values.

    Raises:
        SequenceParallelError: they were made from a shard.
    """
    step, size = context.loss_step, context.mesh.layout.size
    assert step is not None
    rows, local = step.batch.rows, context.local_tokens(step.batch)
    count = count_of_targets(target)
    kind = _kind_by_number(count, context, step)
    if may_be_chosen(input):
        if kind == "row" and not is_part(target):
            kind = "unknown"
        if size > 1:
            number = torch.tensor([get_args(Kind).index(kind)], device=input.device)
            kind = kind if comm.all_equal(number, context.mesh.sequence_group) else "unknown"
    if kind == "shifted":
        raise SequenceParallelError(
            f"{name} over {count} targets = {rows} rows x ({local} - 1): the labels seem to be shifted inside the model, "
            f"on this rank's {local} tokens, which would lose the target at every shard's edge; shift them on the whole sequence "
            "(batch['shift_labels'], as SequenceShardingDataModule does) and use all positions. Two lines make it exact: "
            "from lightning_sp.reductions import shift; loss = F.cross_entropy(logits.flatten(0, 1), shift(labels, 1, -100).flatten()). "
            "Or use global_view=True, in which a step may shift them"
        )
    if kind == "rows" and size > 1 and not (step.num_reductions or context.global_view):
        raise SequenceParallelError(
            f"{name} over {count} targets, one for each of {rows} rows: a pooled head sees only this rank's {local} tokens "
            f"of each sequence; pool over all of them: {POOLED}"
        )
    return kind


def count_of_targets(target: Tensor) -> int:
    """Return the number of targets; class probabilities, (N, V, ...), are one for each position."""
    return target.numel() // (target.shape[min(1, target.dim() - 1)] if target.is_floating_point() else 1)


def _kind_by_number(count: int, context: SequenceContext, step: Step) -> Kind:
    """Return what as many targets are of, by their number alone."""
    rows, size = step.batch.rows, context.mesh.layout.size
    lengths = [context.local_tokens(each) for each in step.batch.sequences]
    if any(count == rows * length for length in lengths):
        return "tokens"
    local = lengths[0]
    # Of two tokens on a rank a shift leaves as many as rows.
    pooled = local == 2 and step.num_reductions > 0
    if size > 1 and count == rows * (local - 1) and local > 1 and not pooled:
        return "shifted"
    if 0 < step.num_summed_in_part <= rows * local - count:
        return "unknown"  # the next piece of the shard's tokens, be it as many as rows
    if count == rows:
        return "rows"
    return "row" if rows > 1 and count in lengths else "unknown"


def check_summable(kind: Kind, input: Tensor, step: Step, size: int, name: str) -> None:
    """Refuse a sum over targets of which it is not known whether each rank has others or all have the same.

    Raises:
        SequenceParallelError: they are neither the shard's tokens nor one for each row, and may come from a reduction.
    """
    if size == 1 or kind != "unknown" or not step.num_reductions or (input.grad_fn is not None and _is_of_shard(input)):
        return
    raise SequenceParallelError(
        f"{name} with reduction='sum' over an input {tuple(input.shape)} in a step that uses lightning_sp.reductions: whether each rank has "
        f"other targets or all have the same is not known; use reduction='mean', or batch_sum({name}(..., reduction='none'), mask) over "
        "tokens or rows"
    )


def _is_of_shard(tensor: Tensor) -> bool:
    """Return whether a tensor's graph reaches this rank's attention, and nothing that was made alike on all ranks."""
    waiting, known, of_attention = [tensor.grad_fn], set(), False
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        name = node.name()
        if any(each in name for each in OVER_RANKS):
            return False
        of_attention |= ATTENTION in name
        waiting += [each for each, _ in node.next_functions]
    return of_attention
