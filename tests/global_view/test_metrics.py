"""torchmetrics in the global view: each row counts once, and what they keep is whole; what a part counts wrong is tried there."""

from __future__ import annotations

import pytest

from tests.global_view import metrics_ranks as ranks

LAYOUTS = [
    (2, dict(ring_size=2)),
    pytest.param(2, dict(ulysses_size=2), marks=pytest.mark.slow),
    pytest.param(4, dict(data_parallel_size=2, ring_size=2), marks=pytest.mark.slow),
]


def same(pools, counts, shifts, world, options):
    [plain] = pools(1).run(ranks.run, counts, shifts, 1, 4, {})
    micro = 4 // options.get("data_parallel_size", 1)
    for found in pools(world).run(ranks.run, counts, shifts, world, micro, options):
        assert found["logged"] == pytest.approx(plain["logged"], rel=1e-9)
        assert found["numbers"] == pytest.approx(plain["numbers"], rel=1e-9)
        assert found["predicted"] == plain["predicted"]
    assert plain["numbers"] or counts == "accuracy"


@pytest.mark.parametrize(("world", "options"), LAYOUTS, ids=str)
def test_counts_and_lists_are_those_of_one_device(pools, world, options):
    """With tuples, whose names a second epoch and a prediction after the fit know from its first batch."""
    same(pools, "all", False, world, options)


@pytest.mark.parametrize("counts", ["matrix", pytest.param("accuracy", marks=pytest.mark.slow)])
def test_a_metric_alone_shows_that_a_part_is_not_the_whole(pools, counts):
    """A matrix is compared, too, and an accuracy that may agree by chance is counted in the global view."""
    same(pools, counts, True, 2, dict(ring_size=2))


def test_a_metric_of_training_keeps_its_ranks_through_a_validation_of_another_view(pools):
    """Training is on parts, for it names its positions; its sum is read behind a validation that counts them itself. A list is whole."""
    [plain] = pools(1).run(ranks.trained_on_parts, 1, {})
    for found in pools(2).run(ranks.trained_on_parts, 2, dict(ulysses_size=2)):
        assert found == plain
    assert plain["trained"] == 12 * ranks.LENGTH
