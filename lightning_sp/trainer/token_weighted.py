"""`TokenWeightedStrategy`: gradient accumulation in Lightning's steps, where each micro-batch weighs as much as it has tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sp import comm
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.loss.token_weighting import TokenWindow, counts_in, has_own_part, scale_gradients
from lightning_sp.parallelize import drop_accumulated
from lightning_sp.trainer.counted_groups import CountedGroups
from lightning_sp.trainer.loops import begins_window
from lightning_sp.trainer.sharded_model import ShardedModelStrategy

_BESIDE = (
    "the samples of one of several training loaders do not divide over the data-parallel groups: beside the other loader's samples one group "
    "has a repeated one, and a part of the loss is of its own rows, so that it would count; give that loader drop_last=True, make the loss of "
    "torch's cross entropies and lightning_sp.reductions, or use CombinedLoader(mode='sequential')"
)


class TokenWeightedStrategy(ShardedModelStrategy):
    """A strategy that weighs the micro-batches of an optimizer step by their tokens: `loss/token_weighting.py`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._window = TokenWindow()
        self._counts: CountedGroups | None = None

    def _start_windows(self, context: SequenceContext, *, refuses: bool) -> None:
        """Begin a fit, which refuses micro-batches of which it is not known how they weigh, or does not."""
        self._window, self._counts = TokenWindow(refuses=refuses), CountedGroups(context)

    def _weighed(self, loss: Tensor, step: Step) -> Tensor:
        """Return what the backward of a micro-batch begins with."""
        loss = self._of_counted_groups(loss, step)
        if begins_window(self._module.trainer):
            self._window.begin()
            drop_accumulated(self._module)
        return self._window.weigh(loss, counts_in(loss, step)) if self._accumulate > 1 else loss

    def _of_counted_groups(self, loss: Tensor, step: Step | None) -> Tensor:
        """Return a loss, of which FSDP averages the gradients of all groups, so that each group counts by its rows, and fillers for nothing.

        The mean of the weights is 1: what of the loss is of all groups' targets or rows already counts as before. A loss that adds up rows is
        one device's, divided by the number of groups.
        """
        rows = () if step is None else step.batch.rows_of_groups
        if step is None:
            return loss
        automatic = bool(self._module.automatic_optimization)
        if (self._counts is not None and self._counts.follow(loss, step, is_normalized=automatic)) or not any(rows):
            return loss
        if min(rows) < 0:
            group = self._device_mesh.get_group("sequence_parallel") if self._device_mesh is not None else None
            comm.agree(_BESIDE if has_own_part(loss, group) else None, self._groups.world)
            return loss
        own = 0 if step.batch.is_filler else step.batch.rows
        if step.adds_up_rows:
            return loss * len(rows) if own else loss * 0.0
        return loss * (own * len(rows) / sum(rows)) if step.batch.is_uneven else loss

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return super().backward(closure_loss, *args, **kwargs)
        finally:
            if self._counts is not None:
                self._counts.release()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._counts is not None:
            self._counts.finish()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        def weighed() -> Any:
            result = closure()
            factor = self._window.close(self._accumulate)
            if factor is not None:
                # After the backward, before Lightning clips.
                scale_gradients(optimizer, factor)
            return result

        return super().optimizer_step(optimizer, weighed, model, **kwargs)
