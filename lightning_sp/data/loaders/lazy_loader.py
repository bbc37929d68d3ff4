"""A DataLoader that starts at its first batch, so that a resume can still set its sampler, and whose samples are drawn alike by the ranks of a
sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_sp.context.streams import mixed_seed
from lightning_sp.data.loaders.own_state import KEPT_BY_CURSOR
from lightning_sp.data.loaders.workers import named_workers, prepare_workers
from lightning_sp.errors import SequenceParallelError


class LazyDataLoader(DataLoader[Any]):
    """A loader that starts at its first batch, not when the iterator is made.

    Lightning makes the iterator before it restores a checkpoint when `configure_optimizers` reads
    `trainer.estimated_stepping_batches`; workers would have fetched the epoch's first samples by then.

    A data set that draws by torch's own stream (a window of a text, a crop, masked words) reads other samples on each rank, whose streams
    differ, for dropout. So each batch is drawn from a seed of its own, the same on the ranks that share it, whatever a resume begins with.

    Attributes:
        follow_users: looks, before an epoch, at what the user has changed of the loader in whose place this one is.
        seeds: what the seeds of batches are made of, beside their epoch and number; None where no ranks share samples.
    """

    follow_users: Callable[[], None] | None = None
    seeds: tuple[int, ...] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches that are left in the epoch.

        Raises:
            SequenceParallelError: the dataset has another number of samples than when its order was made, or the loader another batch size.
        """
        self._check_length()
        if self.follow_users is not None:
            self.follow_users()
        prepare_workers(self)
        with named_workers():
            yield from super().__iter__() if self.seeds is None else self._drawn_alike(self.seeds)

    def _drawn_alike(self, seeds: tuple[int, ...]) -> Iterator[Any]:
        sampler = getattr(self.batch_sampler, "sampler", None)
        epoch, split = getattr(sampler, "epoch", 0), getattr(sampler, "split", None)
        # Behind a resume in an epoch, in micro-batches.
        number = 0 if split is None else sampler.global_samples_skipped // (split.micro_batch_size * split.dp_size)  # type: ignore[union-attr]
        with _drawn_from(mixed_seed(*seeds, epoch)):  # the seeds of workers
            batches = super().__iter__()
        while True:
            with _drawn_from(mixed_seed(*seeds, epoch, number)):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            number += 1
            yield batch

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
        return KEPT_BY_CURSOR

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the resume has set the sampler."""


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Let torch's own stream on the host begin from a seed, and put it back."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
