"""A DataLoader that starts at its first batch, so that a resume can still set its sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


class LazyDataLoader(DataLoader[Any]):
    """A loader that starts at its first batch, not when the iterator is made.

    Lightning makes the iterator before it restores a checkpoint when `configure_optimizers` reads
    `trainer.estimated_stepping_batches`; workers would have fetched the epoch's first samples by then.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches that are left in the epoch."""
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Say that the cursor is stored elsewhere. That there is a state tells Lightning that a resume in an epoch is exact."""
        return {"position_kept_by": "lightning_sp"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the resume has set the sampler."""
