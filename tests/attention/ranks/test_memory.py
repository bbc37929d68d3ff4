"""No mask makes a matrix of scores: the peak memory of one process at 32,768 tokens, for every row of docs/masks.md."""

from __future__ import annotations

import pytest

from lightning_sp.testing import RankPool
from tests.attention.ranks.memory_ranks import LENGTH, peak_bytes
from tests.drawn_cases import masks
from tests.mask_table import ROWS

# q, k, v, out and five gradients and copies of 2 MiB each, tiles of 512 x 512 scores in float32 and int64. One S x S
# matrix of float32 has 4 GiB, one of bool 1 GiB.
BOUND_BYTES = 64 * 2**20
# The others take a minute each, in tiles.
QUICK = ("packed", "chunks")


@pytest.fixture(scope="module")
def process():
    """One that measures memory alone: each measurement gives back what the one before has left."""
    with RankPool(1, timeout_s=600.0) as pool:
        yield pool


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]
)
def test_no_mask_makes_a_matrix(process, name):
    assert LENGTH == 32 * 1024
    (peak,) = process.run(peak_bytes, name)
    assert 2**20 < peak < BOUND_BYTES, f"{name}: {peak / 2**20:.0f} MiB"


def test_every_row_is_measured():
    assert set(QUICK) <= set(ROWS)
    assert set(masks.NAMED) | set(masks.CROSS) <= set(ROWS)
