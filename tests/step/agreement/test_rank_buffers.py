"""Buffers that each data-parallel rank writes of its own rows are those of DDP, exactly: batch norm, and what no version counter shows."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.step.agreement import rank_buffers_ranks as ranks

MOVED = {f"net.{name}" for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "mean")}
MOVED |= {"net.by_row.running_mean", "net.by_row.running_var"}


@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_batch_norm_on_data_parallel_ranks_is_that_of_ddp(pools, accumulate, compared):
    expected = pools(2).run(ranks.by_ddp, accumulate)
    found = pools(2).run(ranks.by_strategy, accumulate, compared)
    assert expected[0]["validated"] != expected[1]["validated"]
    for one, other in zip(found, expected, strict=True):
        assert one["moved"] == (MOVED if compared else None)
        assert one["losses"] == pytest.approx(other["losses"], abs=1e-12)
        assert one["validated"] == pytest.approx(other["validated"], abs=1e-12)
        assert one["state"].keys() == other["state"].keys()
        for name, value in other["state"].items():
            assert max_error(one["state"][name], value) <= 1e-10, name
