"""Interception of `F.cross_entropy` during a step: the mean over the tokens of all ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.loss.reduction import CrossEntropy, nonzero_count, reduce_loss, sum_and_count


class CrossEntropyInterception(AbstractContextManager[None]):
    """Makes `F.cross_entropy` the global one while the context has a step in progress, until it exits; else it stays the original."""

    def __init__(self, context: SequenceContext) -> None:
        self.context = context
        self._original: CrossEntropy | None = None

    def __enter__(self) -> None:
        assert self._original is None
        self._original = F.cross_entropy
        F.cross_entropy = self._cross_entropy

    def __exit__(self, *_: object) -> None:
        if self._original is not None:
            F.cross_entropy = self._original
            self._original = None

    def _cross_entropy(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = IGNORE_INDEX,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        assert self._original is not None
        step = self.context.step
        if step is not None and reduction == "none" and ignore_index != IGNORE_INDEX and not target.is_floating_point():
            target = target.masked_fill(target == IGNORE_INDEX, ignore_index)
        if step is None or reduction == "none":
            return self._original(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.check(input, target)
        if label_smoothing and weight is not None:
            raise SequenceParallelError(
                "cross_entropy with both class weights and label smoothing is not supported on shards: use one"
            )
        logits = input if input.dim() == 2 else input.movedim(1, -1).flatten(0, -2)
        return self.reduce(
            logits,
            target.flatten(),
            None,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )

    def reduce(
        self,
        logits: Tensor,
        target: Tensor,
        group: ProcessGroup | None,
        weight: Tensor | None = None,
        *,
        ignore_index: int,
        reduction: str,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Return the loss over `group`, None for the step's ranks, counting it into the step; over this rank alone in a reference run.

        Shapes: (tokens, V), (tokens,) -> ().
        """
        assert self._original is not None
        if ignore_index != IGNORE_INDEX:
            # Padding and fillers hold IGNORE_INDEX, whatever the user's convention is; as a class index it does not exist.
            target = target.masked_fill(target == IGNORE_INDEX, ignore_index)
        total, count = sum_and_count(self._original, logits, target, weight, ignore_index, label_smoothing)
        step = self.context.step
        if step is None and self.context.reference is not None:
            return total if reduction == "sum" else total / nonzero_count(count)
        if step is not None:
            group = step.loss_group if group is None else group
            step.num_losses += 1
        if reduction == "sum":
            return reduce_loss(total, count, group, "sum")
        both = comm.sum_over_ranks(torch.stack([total, count]), group)
        if step is not None:
            if group is None and self.context.mesh.data_parallel_size > 1:
                step.num_row_means += target.numel() == self.context.local_length
            step.token_counts.append(both[1].detach())
        return both[0] / nonzero_count(both[1].detach())

    def check(self, input: Tensor, target: Tensor) -> None:
        """Refuse targets that are no part of the step's tokens; outside of a step there is nothing to refuse."""
        step = self.context.step
        if step is None:
            return
        rows, local = step.batch.rows, self.context.local_length
        if target.is_floating_point():
            raise SequenceParallelError(
                f"cross_entropy with class probabilities as target, {tuple(target.shape)}: on shards only class indices are supported"
            )
        if input.dim() < 2:
            raise SequenceParallelError(f"cross_entropy over input {tuple(input.shape)}: must be (tokens, classes)")
        if target.numel() == rows * (local - 1) and local > 1:
            raise SequenceParallelError(
                f"cross_entropy over {target.numel()} targets = {rows} rows x ({local} - 1): the labels seem to be shifted inside the model, "
                f"on this rank's {local} tokens, which would lose the target at every shard's edge; shift them on the whole sequence "
                "(batch['shift_labels'], as SequenceShardingDataModule does) and use all positions"
            )
        if target.numel() == rows and local > 1:
            raise SequenceParallelError(
                f"cross_entropy over {target.numel()} targets, one for each of {rows} rows: a pooled head sees only this rank's {local} tokens "
                "of each sequence, so its loss is no mean over tokens; not supported under sequence parallelism"
            )
