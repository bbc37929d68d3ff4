"""`model.generate` inside a step continues whole prompts, as on one device."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.trainer.pretrained import generation_ranks as ranks


def same(actual, expected, *, written=True):
    assert not actual["error"], actual["error"]
    if written:
        assert actual["written"] == expected["written"]
    assert actual["predicted"] == expected["predicted"]
    assert actual["logged"] == pytest.approx(expected["logged"], abs=1e-10)
    for name, weight in expected["weights"].items():
        assert max_error(actual["weights"][name], weight) < 1e-10, name


CASES = [
    ("masked", 15),
    *(
        pytest.param(how, length, marks=pytest.mark.slow)
        for how, length in (("ids", 16), ("by name", 16), ("in training", 16), ("beams", 15))
    ),
]


@pytest.mark.parametrize(("how", "length"), CASES)
def test_whole_prompts_are_continued(pools, how, length):
    [expected] = pools(1).run(ranks.run, how, None, 1, length)
    for actual in pools(2).run(ranks.run, how, dict(ring_size=2), 2, length):
        same(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [dict(ring_size=2, global_view=True), pytest.param(dict(ulysses_size=2), marks=pytest.mark.slow)],
    ids=str,
)
def test_they_are_in_other_layouts(pools, strategy):
    [expected] = pools(1).run(ranks.run, "masked", None, 1, 15)
    for actual in pools(2).run(ranks.run, "masked", strategy, 2, 15):
        same(actual, expected)


@pytest.mark.slow
def test_groups_whose_texts_end_at_other_tokens_wait_for_each_other(pools):
    [expected] = pools(1).run(ranks.run, "masked", None, 1, 16)
    for actual in pools(4).run(ranks.run, "masked", dict(data_parallel_size=2, ring_size=2), 4, 16, 2):
        same(actual, expected, written=False)


def test_what_is_drawn_the_ranks_of_a_sequence_draw_alike(pools):
    first, second = pools(2).run(ranks.run, "sampled", dict(ring_size=2), 2, 16)
    assert not first["error"]
    assert first["written"] == second["written"]
