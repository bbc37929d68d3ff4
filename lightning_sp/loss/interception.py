"""Interception of torch's cross entropies during a step: the mean over the tokens of all ranks.

`F.cross_entropy`, `F.nll_loss`, and `F.linear_cross_entropy` where torch has it; the modules call these.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn._reduction as legacy
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.rules.losses import local_targets
from lightning_sp.global_view.tensors.placement import Placement
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.labels import IGNORE_INDEX, can_be_ignored
from lightning_sp.layout import positions
from lightning_sp.loss.output_head.part_functions import LossOfRows
from lightning_sp.loss.reduction import CrossEntropy, losses_of_tokens, mean_over, reduce_loss, sum_and_count
from lightning_sp.loss.targets import Kind, check_summable, count_of_targets, kind_in_global_view, kind_of_targets

# Binds the names of a model's files that are bound to the first function to the second, until the stack closes.
Rebind = Callable[[CrossEntropy, CrossEntropy, ExitStack], None]


class CrossEntropyInterception(AbstractContextManager[None]):
    """Makes torch's cross entropies global while the context has a step in progress, until it exits; else they stay the originals.

    Args:
        context: of the steps.
        rebind: reaches `from torch.nn.functional import cross_entropy`.
    """

    def __init__(self, context: SequenceContext, rebind: Rebind) -> None:
        self.context, self._rebind = context, rebind
        self._originals: dict[str, CrossEntropy] = {}
        self._undo = ExitStack()

    def __enter__(self) -> None:
        assert not self._originals
        own: dict[str, CrossEntropy] = {
            "cross_entropy": self._cross_entropy,
            "nll_loss": self._nll_loss,
            "linear_cross_entropy": self._linear_cross_entropy,
        }
        # torch 2.13 has the last one.
        self._originals = {name: getattr(F, name) for name in own if hasattr(F, name)}
        for name, original in self._originals.items():
            setattr(F, name, own[name])
            self._rebind(original, own[name], self._undo)

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        for name, original in self._originals.items():
            setattr(F, name, original)
        self._originals = {}

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
        reduction = _reduction(size_average, reduce, reduction)
        return self._over_ranks(
            "F.cross_entropy", self._originals["cross_entropy"], input, target, weight, ignore_index=ignore_index,
            reduction=reduction, label_smoothing=label_smoothing,
        )  # fmt: skip

    def _nll_loss(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = IGNORE_INDEX,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        reduction = _reduction(size_average, reduce, reduction)
        return self._over_ranks(
            "F.nll_loss", self._originals["nll_loss"], input, target, weight, ignore_index=ignore_index, reduction=reduction
        )  # fmt: skip

    def _linear_cross_entropy(
        self,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        *,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        **options: Any,
    ) -> Tensor:
        each = partial(_linear, self._originals["linear_cross_entropy"], linear_weight)
        ignored = IGNORE_INDEX if ignore_index is None else ignore_index
        return self._over_ranks(
            "F.linear_cross_entropy", each, input, target, weight, ignore_index=ignored, reduction=reduction, **options
        )  # fmt: skip

    def _over_ranks(
        self,
        name: str,
        original: CrossEntropy,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        *,
        ignore_index: int,
        reduction: str,
        **options: Any,
    ) -> Tensor:
        """Return the loss: torch's own outside of a step and where nothing is added up, else that of all ranks."""
        # Dynamo calls the function of an `nn.CrossEntropyLoss` once with tensors without data, for the shape of what it will give.
        if self.context.loss_step is None or isinstance(input, FakeTensor):
            return original(input, target, weight=weight, ignore_index=ignore_index, reduction=reduction, **options)
        if isinstance(input, FunctionalTensor):
            raise SequenceParallelError(
                f"{name} of a module made inside of compiled code (nn.CrossEntropyLoss(), as some Hugging Face models do) becomes a part of the "
                "graph, where it would be of this rank's tokens alone: compute the loss outside, from the compiled model's logits, or leave "
                "the model uncompiled and pass compile=True to the strategy, which compiles its blocks"
            )
        shown, placement = None, None
        if isinstance(input, SequenceTensor) and input.dim() == 2 and input.placement.dim == 1:
            input = input.whole()  # the classes are the tokens: one number for each
        if isinstance(input, SequenceTensor):
            placement = input.placement
            input, target, shown = local_targets(input, target)
        elif isinstance(target, SequenceTensor):
            target = target.whole()
        target = _without_fillers(target, ignore_index, self.context.loss_step)
        if reduction == "none":
            losses = LossOfRows(partial(original, **options), weight, ignore_index)
            each_token = losses_of_tokens(losses, input, target, weight)
            return each_token if shown is None else shown(each_token)
        each = partial(original, **{name: value for name, value in options.items() if value is not None})
        return self.reduce(
            input, target, None, weight, each=each, name=name, ignore_index=ignore_index, reduction=reduction, placement=placement,
        )  # fmt: skip

    def reduce(
        self,
        input: Tensor,
        target: Tensor,
        group: ProcessGroup | None,
        weight: Tensor | None = None,
        *,
        ignore_index: int,
        reduction: str,
        each: Callable[..., Tensor] | None = None,
        name: str = "F.cross_entropy",
        placement: Placement | None = None,
    ) -> Tensor:
        """Return the loss over `group`, None for the step's ranks, counting it into the step; over this rank alone in a reference run.

        A sum without a group is over the rows of this data-parallel group, or of all where a trial has told so. `placement` is of the global
        view: where the logits' sequence is; what had none is whole on each rank.

        Shapes: (tokens, V), (tokens,) -> ().
        """
        step, original = self.context.loss_step, each or self._originals["cross_entropy"]
        target = _without_fillers(target, ignore_index, step)
        kind: Kind = "unknown"
        if step is not None and self.context.global_view and not step.batch.is_whole:
            kind = kind_in_global_view(target, self.context, placement)
        elif step is not None:
            kind = kind_of_targets(input, target, self.context, name)
        real = None
        if step is not None and target.is_floating_point():
            real = (
                self._real_tokens(step) if placement is None and kind == "tokens" else _shown_tokens(placement, target)
            )
            if step.batch.is_filler and step.loss_group is None:
                real = torch.zeros(target.numel() // target.shape[min(1, target.dim() - 1)], dtype=torch.bool)
        total, count = sum_and_count(original, input, target, weight, ignore_index, real)
        if step is None:
            if self.context.reference is not None:
                return total if reduction == "sum" else mean_over(total, count)
            return reduce_loss(total, count, group, reduction)
        step.num_losses += 1
        if reduction == "sum":
            if placement is None and kind != "unknown" and self.context.global_view:
                kind = "rows"  # the ranks of a sequence have it alike, one row's tokens too
            elif placement is None:
                check_summable(kind, input, step, self.context.mesh.layout.size, name)
            step.num_sums += group is None
            step.num_summed_in_part += count_of_targets(target) if kind == "unknown" else 0
            return self._sum(total, kind, step) if group is None else comm.sum_over_ranks(total, group)
        return self._mean(total, count, kind, group, step)

    def _sum(self, total: Tensor, kind: Kind, step: Step) -> Tensor:
        """Return the sum over the rows of this data-parallel group, whose losses are averaged as DDP does; or over those of all."""
        mesh = self.context.mesh
        if mesh.layout.size > 1 and kind != "rows":
            total = comm.sum_over_ranks(total, mesh.sequence_group)
        elif mesh.layout.size > 1:
            # The ranks of a sequence have the same rows: each is added once.
            step.row_losses.append(total.detach())
        over_groups = step.loss_group is None and mesh.data_parallel_size > 1 and self.context.sums_over_groups
        return comm.sum_over_ranks(total, mesh.data_group) if over_groups else total

    def _mean(self, total: Tensor, count: Tensor, kind: Kind, group: ProcessGroup | None, step: Step) -> Tensor:
        mesh = self.context.mesh
        if kind == "row" and group is None:
            # Row i of other data-parallel groups is another sample: a mean of rows' means is averaged over the groups as it is.
            group = mesh.sequence_group
        elif kind == "rows" and mesh.layout.size > 1:
            step.row_losses.append(total.detach())
        both = comm.sum_over_ranks(torch.stack([total, count]), step.summed_over if group is None else group)
        mean = mean_over(both[0], both[1].detach())
        if kind != "row":
            step.token_counts.append(both[1].detach())
            step.means.append(mean.grad_fn)
        return mean

    def _real_tokens(self, step: Step) -> Tensor | None:
        """Return which of this rank's tokens are no padding of ours, (rows * s,), where class probabilities cannot say it."""
        batch = step.batch
        if batch.padded_length == batch.length:
            return None
        own = positions(batch.layout, batch.padded_length, self.context.mesh.sequence_rank)
        return (own < batch.length).repeat(batch.rows)


def _shown_tokens(placement: Placement | None, target: Tensor) -> Tensor | None:
    """Return which of this rank's tokens are shown, (rows * s,); None where all are."""
    if placement is None or not placement.has_padding:
        return None
    shown = placement.storage.positions(target.device) < placement.length
    shown = shown.repeat_interleave(placement.inner)
    return shown.repeat(target.shape[0] // len(shown))


def _without_fillers(target: Tensor, ignore_index: int, step: Step | None) -> Tensor:
    """Return the targets with padding and fillers ignored: they hold IGNORE_INDEX, whatever the user's convention is.

    Of a training step on fillers all are, those too that the step has made itself.
    """
    if target.is_floating_point():
        return target
    target = can_be_ignored(target)
    if step is not None and step.batch.is_filler and step.loss_group is None:
        return torch.full_like(target, ignore_index)
    return target if ignore_index == IGNORE_INDEX else target.masked_fill(target == IGNORE_INDEX, ignore_index)


def _linear(original: CrossEntropy, linear_weight: Tensor, input: Tensor, target: Tensor, **options: Any) -> Tensor:
    if target.is_floating_point():
        options["ignore_index"] = None  # torch refuses another
    return original(input, linear_weight, target, **options)


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """Return the reduction, by the names that torch had for it before."""
    if size_average is None and reduce is None:
        return reduction
    name: str = legacy.legacy_get_string(size_average, reduce)
    return name
