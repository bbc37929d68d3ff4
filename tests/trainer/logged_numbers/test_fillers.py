"""A filler keeps other ranks' messages company: the numbers that a run logs are those of one device."""

from __future__ import annotations

import pytest

from tests.slow import slow
from tests.trainer.logged_numbers import filler_ranks as ranks

# Rank 0's own number, of half of the rows.
OWN = {"train_loss"}
# On parts metrics add up over the ranks of a sequence, too.
OF_PARTS = {"of rows", "each row"}


@pytest.mark.parametrize(
    ("world", "strategy", "rows", "others"),
    [
        (2, {"data_parallel_size": 2}, 7, OWN),
        (2, {"data_parallel_size": 2}, 1, OWN),  # of one group all rows are fillers
        pytest.param(4, {"data_parallel_size": 2, "ulysses_size": 2}, 5, OWN | OF_PARTS, marks=pytest.mark.slow),
        *slow((4, {"data_parallel_size": 2, "ulysses_size": 2, "global_view": True}, 5, OWN)),
    ],
)
def test_what_is_logged_beside_fillers_is_one_devices(pools, world, strategy, rows, others):
    """Means over rows, counts of rows, largest and least numbers, of steps, hooks and metrics; of rank 0, which shows them."""
    [(alone, steps, ended)] = pools(1).run(ranks.fit, 1, None, rows, 2)
    answers = pools(world).run(ranks.fit, world, strategy, rows, 1)
    found, shown, _ = answers[0]
    assert found.keys() == alone.keys()
    # Metrics add up in float32.
    assert {n: found[n] for n in found.keys() - others} == pytest.approx(
        {n: alone[n] for n in alone.keys() - others}, rel=1e-6
    )
    assert len(shown) == len(steps)
    for own, other in zip(shown, steps, strict=True):
        assert own == pytest.approx(other, rel=1e-9)
    assert sum([answer[2] for answer in answers][:: world // 2]) == ended == rows


def test_an_evaluation_counts_no_filler_and_needs_no_targets(pools):
    [(alone, predicted)] = pools(1).run(ranks.evaluate, 1, None, 3)
    for found, rows in pools(2).run(ranks.evaluate, 2, {"data_parallel_size": 2}, 3):
        assert found == pytest.approx(alone, rel=1e-9)
        assert rows == pytest.approx(predicted, rel=1e-9)
