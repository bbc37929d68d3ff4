"""Targets in a dtype without a sign, where -100 would be another class: what fills up a batch counts nowhere."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.labels import IGNORE_INDEX, shift_labels
from lightning_sp.testing import max_error
from tests.trainer.batches import unsigned_ranks as ranks

PART, WHOLE = dict(preflight=False), dict(preflight=False, global_view=True)


@pytest.mark.parametrize(
    ("dtype", "as_they_are", "strategy"),
    [
        (torch.uint8, True, PART),
        (torch.uint8, True, WHOLE),
        pytest.param(torch.uint8, False, PART, marks=pytest.mark.slow),
        # torch cannot read such tensors that it has pickled, as trials send them.
        (torch.uint16, False, dict(ring_size=2)),
        pytest.param(torch.uint16, False, dict(global_view="auto"), marks=pytest.mark.slow),
    ],
    ids=["bytes", "bytes, global view", "bytes as int64", "uint16", "uint16, by default"],
)
def test_it_trains_as_one_device_does(pools, dtype, as_they_are, strategy):
    for (expected, weights), (losses, own) in pools(2).run(ranks.fit, dtype, as_they_are, strategy):
        assert losses == pytest.approx(expected, abs=1e-10)
        assert all(max_error(own[name], weight) < 1e-10 for name, weight in weights.items())


def test_labels_that_are_shifted_have_no_target_for_the_last():
    shifted = shift_labels(torch.tensor([[1, 2, 3]], dtype=torch.uint8))
    assert shifted.dtype == torch.int64
    assert shifted.tolist() == [[2, 3, IGNORE_INDEX]]
