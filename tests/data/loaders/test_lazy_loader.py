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
