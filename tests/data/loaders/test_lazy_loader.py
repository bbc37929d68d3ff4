"""A loader that starts at its first batch refuses an order that is no longer its dataset's."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.data.loaders.replace_sampler import replace_sampler
from lightning_sp.errors import SequenceParallelError


class Sized(Dataset[int]):
    """As many samples as it is told."""

    size = 12

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("training", [True, False])
def test_a_dataset_that_has_another_length_than_its_order_is_refused(training: bool) -> None:
    data = Sized()
    coordinates = DataCoordinates(dp_rank=0, dp_size=1, sequence_group=None, control_group=None)
    loader = replace_sampler(DataLoader(data, batch_size=2), coordinates, training=training, accumulation=1, seed=0)
    assert len(list(loader)) == 6
    data.size = 7
    with pytest.raises(SequenceParallelError, match=r"^the dataset Sized has 7 samples, and had 12 when the order"):
        next(iter(loader))


@pytest.mark.parametrize("training", [True, False])
def test_what_the_user_changes_of_the_loader_counts_from_the_next_epoch_on(training: bool) -> None:
    """Through the loader that a module keeps hold of, and through the one in its place."""
    coordinates = DataCoordinates(dp_rank=0, dp_size=1, sequence_group=None, control_group=None)
    users = DataLoader(Sized(), batch_size=4)
    loader = replace_sampler(users, coordinates, training=training, accumulation=1, seed=0)
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    users.collate_fn = sum
    assert list(loader) == [6, 22, 38]
    loader.collate_fn = max
    assert list(loader) == [3, 7, 11]
    users.collate_fn = min
    assert list(loader) == [0, 4, 8]


@pytest.mark.parametrize("through", ["the user's", "the Trainer's"])
def test_another_batch_size_than_the_order_was_made_of_is_refused(through: str) -> None:
    coordinates = DataCoordinates(dp_rank=0, dp_size=1, sequence_group=None, control_group=None)
    users = DataLoader(Sized(), batch_size=4)
    loader = replace_sampler(users, coordinates, training=True, accumulation=1, seed=0)
    changed = users if through == "the user's" else loader
    assert changed.batch_sampler.batch_size == 4
    changed.batch_sampler.batch_size = 2
    with pytest.raises(
        SequenceParallelError, match=r"batch_size=2, drop_last=False, and had batch_size=4, drop_last=False when"
    ):
        next(iter(loader))
