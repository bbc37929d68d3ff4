"""Without a sequence that is split, a batch passes as it is: whatever its entries are called, and however its labels stand."""

from __future__ import annotations

import pytest

from tests.trainer.batches import data_parallel_ranks as ranks


def test_labels_and_entries_of_any_name_are_those_of_one_device(pools):
    [plain] = pools(1).run(ranks.fit, 1, None, 4)
    for found in pools(2).run(ranks.fit, 2, dict(data_parallel_size=2), 2):
        assert found["val"] == pytest.approx(plain["val"], rel=1e-10)
        for name, weight in plain["weights"].items():
            assert (found["weights"][name] - weight).abs().max() <= 1e-10, name
