"""A step that reads labels as indices trains as on one device where the ranks do not divide the length, or is refused on all ranks together."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.trainer.batches import padding_ranks as ranks


def hold(pools, strategy, world, cases, micro=2):
    alone = pools(1).run(ranks.runs, [dict(strategy=None, world=1, micro=micro, **case) for case in cases])[0]
    dp = strategy.get("data_parallel_size", 1)
    given = [
        dict(strategy={"global_view": "auto", **strategy}, world=world, micro=micro // dp, **case) for case in cases
    ]
    for answers in pools(world).run(ranks.runs, given):
        for case, actual, expected in zip(cases, answers, alone, strict=True):
            assert not actual["error"], (case, actual["error"])
            if dp == 1:  # a loss by hand is each group's own, and their mean is one device's
                assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-10), case
            assert actual["logged"] == pytest.approx(expected["logged"], abs=1e-10), case
            for name, weight in expected["weights"].items():
                assert max_error(actual["weights"][name], weight) < 1e-10, (case, name)


@pytest.mark.slow
def test_a_first_batch_of_an_odd_length_goes_on_in_the_global_view(pools):
    hold(pools, dict(ring_size=2), 2, [dict(loss=name, lengths=(31, 29)) for name in ranks.LOSSES])


@pytest.mark.slow
def test_a_later_batch_of_an_odd_length_does(pools):
    cases = [dict(loss=name, lengths=(32, 29, 32, 31)) for name in ("gather", "one_hot")]
    cases += [dict(loss=name, lengths=(32, 31), validates=True) for name in ("gather", "asserted")]
    hold(pools, dict(ulysses_size=2), 2, cases)


@pytest.mark.slow
def test_it_does_beside_data_parallel_groups(pools):
    cases = [dict(loss=name, lengths=(31, 29)) for name in ("gather", "take")]
    cases += [dict(loss="gather", lengths=(31, 31), validates=True)]
    hold(pools, dict(data_parallel_size=2, ring_size=2), 4, cases)


def test_without_the_global_view_it_is_refused_on_all_ranks_with_what_to_write(pools):
    cases = [dict(loss="gather", lengths=(31,)), dict(loss="gather", lengths=(32, 31), validates=True, plainly=True)]
    given = [dict(strategy=dict(ring_size=2, global_view=False), world=2, **case) for case in cases]
    for answers in pools(2).run(ranks.runs, given):
        for answer, name in zip(answers, ("training_step", "validation_step"), strict=True):
            assert f"{name} runs on a crop of" in answer["error"], answer
            assert "-100" in answer["error"]
            assert "labels.clamp(min=0)" in answer["error"]
            assert "global_view=True" in answer["error"]
