"""A DataLoader that starts at its first batch, so that a resume can still set its sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_sp.data.loaders.workers import named_workers, prepare_workers
from lightning_sp.errors import SequenceParallelError


class LazyDataLoader(DataLoader[Any]):
    """A loader that starts at its first batch, not when the iterator is made.

    Lightning makes the iterator before it restores a checkpoint when `configure_optimizers` reads
    `trainer.estimated_stepping_batches`; workers would have fetched the epoch's first samples by then.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches that are left in the epoch.

        Raises:
            SequenceParallelError: the dataset has another number of samples than when its order was made.
        """
        self._check_length()
        prepare_workers(self)
        with named_workers():
            yield from super().__iter__()

    def _check_length(self) -> None:
        inner = getattr(self.batch_sampler, "sampler", None)
        known = getattr(self.batch_sampler if inner is None else inner, "num_samples", None)
        if known is not None and known != (now := len(self.dataset)):  # type: ignore[arg-type]
            name = type(getattr(self.dataset, "stood_for", self.dataset)).__name__
            raise SequenceParallelError(
                f"the dataset {name} has {now} samples, and had {known} when the order of this epoch was drawn: "
                "samples would be left out, or asked for in vain; Trainer(reload_dataloaders_every_n_epochs=1) makes it anew, or keep the "
                "number for a run"
            )

    def state_dict(self) -> dict[str, Any]:
        """Say that the cursor is stored elsewhere. That there is a state tells Lightning that a resume in an epoch is exact."""
        return {"position_kept_by": "lightning_sp"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the resume has set the sampler."""
