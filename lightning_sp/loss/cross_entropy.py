"""Cross entropy over the tokens of the global batch, however they are sharded.

    loss = sum over ranks of the local sum / sum over ranks of the local count        (mean)

During a sharded step `F.cross_entropy` is this: the value is the one that a single process shows for the global batch, the same on all
ranks, so anything the user computes from it (weights, sums of losses) stays right. Its gradient carries the factor `world`, which FSDP's
average over the world divides by: `comm.sum_over_ranks` alone undoes that averaging.

With gradient accumulation each micro-batch is weighted by its tokens: see `TokenWindow`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.global_view.rules.losses import local_targets
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.loss.interception import CrossEntropyInterception
from lightning_sp.loss.reduction import reduce_loss, sum_and_count


def sharded_cross_entropy(
    logits: Tensor,
    shift_labels: Tensor,
    *,
    group: ProcessGroup | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy over the valid tokens of all ranks; for those who want it by hand.

    Args:
        logits: this rank's, or in the global view those that show the whole, in any floating dtype; summed in float32 or more.
        shift_labels: the target of each position of this rank, `ignore_index` where none. Already shifted.
        group: the ranks whose tokens make up the mean; None for those of the strategy's step in progress (the world in training, the
            sequence's ranks in evaluation), the world outside of one.
        ignore_index: label of positions without a target.
        reduction: "mean" or "sum" over the tokens of all ranks.

    Shapes: (..., V), (...) -> (). Communicates: one all_reduce of two numbers.

    Returns:
        The same number on all ranks; exactly 0 when no rank has a target. Its gradient carries the factor `group size`, for a data-parallel
        average over that group.
    """
    logits, target = logits.flatten(0, -2), shift_labels.flatten()
    placement = None
    if isinstance(logits, SequenceTensor):
        placement = logits.placement
        logits, target, _ = local_targets(logits, target)
    elif isinstance(target, SequenceTensor):
        target = target.whole()
    interception = getattr(F.cross_entropy, "__self__", None)
    if isinstance(interception, CrossEntropyInterception):
        step = interception.context.loss_step
        if reduction == "sum" and step is not None and group is None:
            step.num_over_groups += 1
            group = step.summed_over or comm.world()
        return interception.reduce(
            logits, target, group, ignore_index=ignore_index, reduction=reduction, placement=placement
        )
    total, count = sum_and_count(F.cross_entropy, logits, target, None, ignore_index)
    return reduce_loss(total, count, group, reduction)
