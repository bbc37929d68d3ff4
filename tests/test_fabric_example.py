"""examples/fabric.py: a loop of one's own gives the losses of plain transformers on one device, whichever the degrees."""

from __future__ import annotations

import pytest

from tests import fabric_ranks as ranks

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("world", "ring_size", "data_parallel_size"), [pytest.param(2, 1, 1, marks=pytest.mark.slow), (4, 2, 2)]
)
def test_its_losses_are_those_of_one_device(pools, world, ring_size, data_parallel_size):
    (expected,) = pools(1).run(ranks.plain)
    assert expected[-1] < expected[0]
    for found in pools(world).run(ranks.example, world, ring_size, data_parallel_size):
        # Transformers' own loss computes in float32.
        assert found == pytest.approx(expected, rel=1e-6)
