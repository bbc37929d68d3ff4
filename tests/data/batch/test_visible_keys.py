"""Which keys a padding mask leaves visible: all, a run of each row, or each for itself."""

from __future__ import annotations

import pytest
import torch

from lightning_sp import SequenceParallelError
from lightning_sp.data.batch.padding import VisibleKeys, read_visible_keys


def test_a_mask_of_runs_is_known_by_their_ends():
    assert read_visible_keys(torch.ones(2, 4), 1, global_view=False) == VisibleKeys()
    found = read_visible_keys(torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]]), 1, global_view=False)
    assert found.each is None
    assert found.run is not None
    assert found.run.tolist() == [[1, 3], [0, 2]]
    holes = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    found = read_visible_keys(holes, 1, global_view=False)
    assert found.run is None
    assert found.each is not None
    assert found.each.tolist() == (holes != 0).tolist()


def test_several_texts_of_a_row_are_the_global_views():
    mask = torch.tensor([[[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]])
    assert read_visible_keys(mask, 2, global_view=True) == VisibleKeys()
    with pytest.raises(
        SequenceParallelError, match=r"of shape \(1, 3, 4\) hides tokens of 3 texts in each row; a rank's"
    ):
        read_visible_keys(mask, 2, global_view=False)


@pytest.mark.parametrize(("shape", "dim"), [((2, 4, 4), 1), ((2, 1, 4, 4), 2), ((4,), 0)])
@pytest.mark.parametrize("global_view", [False, True])
def test_a_mask_of_queries_and_keys_is_refused(shape, dim, global_view):
    with pytest.raises(
        SequenceParallelError, match=r"must be \(batch, tokens\); a mask of queries and keys goes under"
    ):
        read_visible_keys(torch.ones(shape), dim, global_view=global_view)
