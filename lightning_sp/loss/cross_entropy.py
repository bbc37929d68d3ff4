"""Cross entropy over the tokens of the global batch, whatever each rank holds.

    loss = sum over ranks of the local sum / sum over ranks of the local count        (mean)

During a sharded step `F.cross_entropy` is this: the value is the one that a single process shows for the global batch, the same on all
ranks, so anything the user computes from it (weights, sums of losses) stays right. Its gradient carries the factor `world`, which FSDP's
average over the world takes back: the one place where that averaging is undone is `comm.sum_over_ranks`.

With gradient accumulation each micro-batch is weighted by its tokens: see `TokenWindow`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError

CrossEntropy = Callable[..., Tensor]
# torch's own default of ignore_index.
PADDED_LABEL = -100


def sharded_cross_entropy(
    logits: Tensor,
    shift_labels: Tensor,
    *,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy over the valid tokens of all ranks; for those who want it by hand.

    Args:
        logits: this rank's, in any floating dtype; summed in float32 or more.
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
    interception = getattr(F.cross_entropy, "__self__", None)
    if isinstance(interception, CrossEntropyInterception):
        interception.check(logits, target)
        return interception.reduce(logits, target, group, ignore_index=ignore_index, reduction=reduction)
    total, count = _sum_and_count(F.cross_entropy, logits, target, None, ignore_index, 0.0)
    return reduce_loss(total, count, group, reduction)


def reduce_loss(total: Tensor, count: Tensor, group: ProcessGroup | None, reduction: str = "mean") -> Tensor:
    """Return the mean (or sum) over ranks from each rank's sum and count of tokens.

    Communicates: one all_reduce of two numbers. A count of zero everywhere gives exactly 0.
    """
    both = comm.sum_over_ranks(torch.stack([total, count.to(total.dtype)]), group)
    return both[0] if reduction == "sum" else both[0] / _or_one(both[1].detach())


def _or_one(count: Tensor) -> Tensor:
    """Return the count, 1 where it is zero: what no token adds to is exactly 0. Class weights may add up to less than 1."""
    return torch.where(count == 0, torch.ones_like(count), count)


def _sum_and_count(
    original: CrossEntropy,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Per token, then summed in float32 or more: a bfloat16 sum over a long shard would lose digits; an empty shard sums to exact zero."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    each = original(
        logits, target, weight=weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    valid = target != ignore_index
    count = valid.sum() if weight is None else weight[target.masked_fill(~valid, 0)].masked_fill(~valid, 0).sum()
    return each.to(dtype).sum(), count.to(dtype)


class CrossEntropyInterception(AbstractContextManager[None]):
    """Makes `F.cross_entropy` the global one while the context has a step in progress; else it stays the original.

    A class because it holds the function it replaces until it is put back.
    """

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
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        assert self._original is not None
        step = self.context.step
        if step is not None and reduction == "none" and ignore_index != PADDED_LABEL and not target.is_floating_point():
            target = target.masked_fill(target == PADDED_LABEL, ignore_index)
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
        """Return the loss over `group`, None for the step's ranks, counting it into the step; over this rank alone in a whole run.

        Shapes: (tokens, V), (tokens,) -> ().
        """
        assert self._original is not None
        if ignore_index != PADDED_LABEL:
            # What padding and fillers hold, whatever the user's convention is; as a class index it does not exist.
            target = target.masked_fill(target == PADDED_LABEL, ignore_index)
        total, count = _sum_and_count(self._original, logits, target, weight, ignore_index, label_smoothing)
        step = self.context.step
        if step is None and self.context.reference is not None:
            return total if reduction == "sum" else total / _or_one(count)
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
        return both[0] / _or_one(both[1].detach())

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


class TokenWindow:
    """Makes an optimizer step's gradient the mean over all tokens of its micro-batches, however many each holds.

    Each micro-batch's loss L_m is a mean over its n_m tokens. Backward sees w_m L_m / A, with w_m = n_m / n_0 and A Lightning's
    accumulate_grad_batches; before clipping the gradients are multiplied by A n_0 / sum n_m. Together: sum n_m L_m / sum n_m.
    With A = 1 nothing is multiplied. Counts stay tensors: no host sync. A class because a window spans several steps.
    """

    def __init__(self) -> None:
        self._first: Tensor | None = None
        self._total: Tensor | None = None
        self._micro_batches = 0

    def weigh(self, loss: Tensor, token_counts: list[Tensor]) -> Tensor:
        """Return w_m L_m for the loss of a micro-batch.

        Raises:
            SequenceParallelError: several losses with different counts: which one weighs the micro-batch would be a guess.
        """
        self._micro_batches += 1
        if not token_counts:
            raise SequenceParallelError(
                "gradient accumulation needs the token count of each micro-batch, and this loss came from no mean cross_entropy: "
                "return {'loss': sum over this rank's tokens, 'num_tokens': their count} from training_step, or accumulate_grad_batches=1"
            )
        if len(token_counts) > 1 and not all(bool(torch.equal(c, token_counts[0])) for c in token_counts):
            raise SequenceParallelError(
                f"{len(token_counts)} cross entropies with different token counts {[int(c) for c in token_counts]} in one micro-batch: with "
                "gradient accumulation their weights are ambiguous; use accumulate_grad_batches=1, or give them the same ignored labels"
            )
        count = token_counts[0]
        if self._first is None or self._total is None:
            # A first micro-batch without tokens weighs nothing, but divides the others by 1 and not by 0.
            self._first, self._total = _or_one(count), count
            return loss * (count / self._first)
        self._total = self._total + count
        return loss * (count / self._first)

    def close(self, accumulate: int) -> Tensor | None:
        """End the window and return the factor of the gradients, None for 1."""
        first, total = self._first, self._total
        self._first = self._total = None
        self._micro_batches = 0
        if first is None or total is None or accumulate == 1:
            return None
        return accumulate * first / _or_one(total)


def loss_of(output: Any, loss_group: ProcessGroup | None) -> tuple[Any, list[Tensor] | None]:
    """Return a step's output with a returned sum and count made into the mean, and the counts if it had them.

    Args:
        output: what training_step returned: a tensor, or a mapping with "loss" and perhaps "num_tokens" (then "loss" is a local sum).
        loss_group: the ranks whose tokens make up the mean.
    """
    if not isinstance(output, Mapping) or "num_tokens" not in output:
        return output, None
    count = torch.as_tensor(output["num_tokens"], device=output["loss"].device).to(output["loss"].dtype)
    total_count = comm.reduce_sum(count, loss_group)
    return {**output, "loss": reduce_loss(output["loss"], count, loss_group)}, [total_count]
