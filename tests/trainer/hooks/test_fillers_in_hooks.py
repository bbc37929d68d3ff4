"""Hooks and steps share what they keep of a filler, and nothing of it is left: what they find is one device's."""

from __future__ import annotations

import pytest

from tests.slow import slow
from tests.trainer.hooks import filler_hook_ranks as ranks

GROUPS = {"data_parallel_size": 2}


@pytest.mark.parametrize("kind", [each if each != "counting" else slow(each)[0] for each in ranks.KINDS])
def test_a_fit_whose_last_batch_is_a_filler_of_one_group(pools, kind):
    [(logged, found, weights)] = pools(1).run(ranks.fit, kind, 1, None)
    answers = pools(2).run(ranks.fit, kind, 2, GROUPS)
    for own, seen, trained in answers:
        assert seen == found
        for name, weight in weights.items():
            assert (trained[name] - weight).abs().max() < 1e-10, name
        assert own["rows"] == logged["rows"]
    # Of metrics, in float32.
    assert answers[0][0] == pytest.approx(logged, rel=1e-6)


@pytest.mark.parametrize("rows", [3, 1])
def test_a_validation_whose_last_batch_is_a_filler_of_one_group(pools, rows):
    """Of one row a group has fillers alone. What hooks append is that of a rank's own rows."""
    [(logged, found)] = pools(1).run(ranks.validate, 1, None, rows)
    first, second = pools(2).run(ranks.validate, 2, GROUPS, rows)
    assert first[0] == second[0] == pytest.approx(logged)
    assert [*first[1], *second[1]][::2] == ([found[0], found[4], found[2]] if rows == 3 else found[:1])
    assert first[1][-1] == found[-1] == rows
