"""Which evaluation batch is in progress, and whether it only keeps the other ranks company."""

from __future__ import annotations

from typing import Any

from lightning_sp.data.loaders.replace_sampler import is_filler_batch, num_groups
from lightning_sp.errors import SequenceParallelError
from lightning_sp.trainer.loops import evaluated_step, evaluation_loop


class EvaluationProgress:
    """Counts the batches of each evaluation loader: a step that takes no batch_idx is given none."""

    def __init__(self) -> None:
        self._loader, self._batch = 0, -1

    def advance(self, trainer: Any, dataloader_idx: int) -> None:
        """Count a batch when it is moved to the device, unless it is one of training."""
        if not trainer.evaluating and not trainer.predicting:
            return
        loop = evaluation_loop(trainer)
        first = loop.batch_progress.current.ready == 0 or dataloader_idx != self._loader
        self._loader, self._batch = dataloader_idx, 0 if first else self._batch + 1

    @property
    def begins(self) -> bool:
        """Whether the batch in progress is its loader's first."""
        return self._batch == 0

    def is_filler(self, trainer: Any) -> bool:
        """Return whether all samples of the batch in progress belong to another rank; of training the loader does not know.

        Raises:
            SequenceParallelError: loaders side by side are dealt over several groups; on all ranks.
        """
        if not trainer.evaluating and not trainer.predicting:
            return False
        loaders = evaluation_loop(trainer)._combined_loader
        if loaders is None:
            return False
        dealt = [each for each in loaders.flattened if num_groups(each) > 1]
        if dealt and len(loaders.flattened) > 1 and loaders._mode != "sequential":
            raise SequenceParallelError(
                f"CombinedLoader(mode={loaders._mode!r}) of {len(loaders.flattened)} loaders in {evaluated_step(trainer)}: the batches of each "
                f"are dealt over {num_groups(dealt[0])} data-parallel groups by themselves, and others stand side by side than on one device; "
                "use mode='sequential', one loader of samples that hold both, or data_parallel_size=1"
            )
        return is_filler_batch(loaders.flattened[self._loader], self._batch)

    def batch_start_hook(self, trainer: Any) -> tuple[str, tuple[int, ...]]:
        """Return the hook that has had the batch in progress, and what it was told: the batch's index, and the loader's of several."""
        loop = evaluation_loop(trainer)
        several = loop.num_dataloaders > 1 and getattr(loop, "_is_sequential", True)
        return f"on_{evaluated_step(trainer)}_batch_start", (self._batch, self._loader) if several else (self._batch,)
