"""What a step does with tokens that its first batches do not hold is compared before the first step: later it would be said of nothing."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.preflight.batches import later_tokens_ranks as ranks

FAST = ("behind the mark", "looked up", "elapsed", "kinds of tokens", "share of tokens", "rare tokens")
KINDS = [pytest.param(each, marks=[] if each in FAST else pytest.mark.slow) for each in ranks.KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_reads_tokens_of_later_batches_trains_as_one_device(pools, kind):
    [(_, alone)] = pools(1).run(ranks.fit, kind, 1, None)
    for error, weights in pools(2).run(ranks.fit, kind, 2, {"ring_size": 2, "global_view": "auto"}):
        assert not error
        for name, weight in alone.items():
            assert max_error(weights[name], weight) < 1e-10, name


def test_with_a_ranks_part_alone_it_is_refused_before_the_first_step(pools):
    for error, _ in pools(2).run(ranks.fit, "segments", 2, {"ring_size": 2, "global_view": False}):
        assert f"with {ranks.MARK} in input_ids" in error, error
        assert "gives another result on shards than whole" in error


@pytest.mark.parametrize("opens", [False, True], ids=["tokens", "outcomes"])
def test_evaluations_that_read_tokens_of_later_batches_are_one_devices(pools, opens):
    [alone] = pools(1).run(ranks.evaluate, 1, None, opens)
    for found in pools(2).run(ranks.evaluate, 2, {"ring_size": 2, "global_view": "auto"}, opens):
        for name, wanted in alone.items():
            assert max_error(found[name], wanted) < 1e-10, name


@pytest.mark.slow
def test_groups_with_sequences_are_compared_likewise(pools):
    [(_, alone)] = pools(1).run(ranks.fit, "segments", 1, None)
    degrees = {"data_parallel_size": 2, "ring_size": 2, "global_view": "auto"}
    for error, _ in pools(4).run(ranks.fit, "segments", 4, degrees):
        assert not error
    assert alone
