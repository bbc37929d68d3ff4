"""Fillers: samples that are repeated where a rank would have none in the last batch.

Every rank must take part in the collectives of a micro-batch. A sampler gives the index of a filler as ``~i``. In training its batch has a mark,
by which losses leave it out (`loss.interception`, `reductions`, `trainer.token_weighted`); a step finds sample i as it is, for it may look up
its targets. Beside another loader's batch of the same step its targets are ignored instead. Of an evaluation's nothing stays (`step.fillers`).
A rank's batch holds fillers alone, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from lightning_sp.data.batch.filler_marks import marked
from lightning_sp.data.samplers.filler_index import FillerIndex


class MarkedSample(NamedTuple):
    """A sample that is a filler."""

    sample: Any


class MarkedBatch(NamedTuple):
    """What a data set gives for many indices at once (`__getitems__`), all of fillers."""

    samples: Any


class StandsFor:
    """An object in the place of one of the user's: every attribute but its own is that one's, to read and to write.

    Users reach theirs through the Trainer: `trainer.train_dataloader.dataset.length = 512` is to change what is loaded.

    Args:
        users: the object.
        own: attributes of this one.
    """

    def __init__(self, users: Any, **own: Any) -> None:
        vars(self).update(own, stood_for=users)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's object; not what Python and torch look up to copy it or to read many samples at once."""
        if name.startswith("__") or "stood_for" not in vars(self):
            raise AttributeError(name)
        return getattr(self.stood_for, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the user's object."""
        setattr(self.stood_for, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the user's object."""
        delattr(self.stood_for, name)


class FillerDataset(StandsFor, Dataset[Any]):
    """Sample i of a dataset for index i, and the same, marked as a filler, for ``~i``."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)

    def __len__(self) -> int:
        """Count the real samples."""
        return len(self.stood_for)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample, as it is or marked; for what users ask otherwise, a slice say, what their data set gives."""
        return MarkedSample(self.stood_for[~index]) if type(index) is FillerIndex else self.stood_for[index]

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the samples of a batch, as torch asks for them: all at once where the user's data set does so."""
        at_once = getattr(self.stood_for, "__getitems__", None)
        if not at_once:
            return [self[index] for index in indices]
        if type(indices[0]) is FillerIndex:
            return MarkedBatch(at_once([~index for index in indices]))
        return at_once(indices)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The user's own: `isinstance(self.trainer.train_dataloader.dataset, Subset)`."""
        return type(self.stood_for)

    def __reduce__(self) -> Any:
        """Give another process the user's data set, in one of these."""
        return FillerDataset, (self.stood_for,)


class FillerCollate(StandsFor):
    """A collate function that marks a batch of fillers in training.

    Args:
        collate: the user's: samples -> a batch.
        trains: the batches are trained on.
        fillers_come: of training, this run has fillers. A batch that can have no mark is then refused at once, not at an epoch's end.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], *, trains: bool, fillers_come: bool = False) -> None:
        super().__init__(collate, trains=trains, fillers_come=fillers_come)

    def __call__(self, samples: Any) -> Any:
        """Collate samples of a `FillerDataset`."""
        is_filler = type(samples) is MarkedBatch or (isinstance(samples, list) and type(samples[0]) is MarkedSample)
        if is_filler:
            samples = samples.samples if type(samples) is MarkedBatch else [each.sample for each in samples]
        batch = self.stood_for(samples)
        found = marked(batch) if self.fillers_come or (is_filler and self.trains) else batch
        return found if is_filler and self.trains else batch
