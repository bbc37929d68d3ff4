"""Which evaluation batch is in progress, and whether it only keeps the other ranks company."""

from __future__ import annotations

from typing import Any

from lightning_sp.data.loaders.replace_sampler import is_filler_batch


class EvaluationProgress:
    """Counts the batches of each evaluation loader: a step that takes no batch_idx is not told it."""

    def __init__(self) -> None:
        self._loader, self._batch = 0, -1

    def advance(self, loop: Any, dataloader_idx: int) -> None:
        """Count a batch of a loop of Lightning's, when it is moved to the device."""
        first = loop.batch_progress.current.ready == 0 or dataloader_idx != self._loader
        self._loader, self._batch = dataloader_idx, 0 if first else self._batch + 1

    def is_filler(self, loop: Any) -> bool:
        """Return whether all samples of the batch in progress belong to another rank."""
        loaders = loop._combined_loader
        return loaders is not None and is_filler_batch(loaders.flattened[self._loader], self._batch)
