"""Steps that group neighbouring tokens: right where parts begin at a group's first token, as those of the first batch may."""

from __future__ import annotations

import functools

import pytest

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.layout import SequenceLayout
from lightning_sp.preflight.batches.batches_to_try import BatchesToTry
from lightning_sp.preflight.crops.crop import uneven_tokens
from tests.preflight.batches import other_cuts_ranks as ranks
from tests.slow import slow

RING, ULYSSES = dict(ring_size=2), dict(ulysses_size=2)


@pytest.mark.parametrize("what", ["pairs", *slow("every second")])
@pytest.mark.parametrize(
    ("degrees", "lengths"), [(RING, (16, 16, 12, 20)), *slow((ULYSSES, (16, 16, 10, 14)))], ids=["ring", "ulysses"]
)
def test_a_step_that_groups_neighbours_is_tried_before_a_batch_that_is_cut_elsewhere(pools, degrees, lengths, what):
    [plain] = pools(1).run(ranks.fit, 1, None, what, lengths)
    for found in pools(2).run(ranks.fit, 2, degrees, what, lengths):
        assert found["whole"]
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-10)
        for name, weight in plain["weights"].items():
            assert (found["weights"][name] - weight).abs().max() <= 1e-10, name


@pytest.mark.slow
def test_in_a_window_of_micro_batches_it_is_tried_before_the_next_step(pools):
    run = functools.partial(ranks.fit, accumulate_grad_batches=2)
    assert all(found["whole"] for found in pools(2).run(run, 2, RING, "pairs", (16, 12, 16, 16)))


def test_a_step_that_groups_none_stays_on_its_part_and_is_tried_once(pools):
    lengths = (16, 12, 8, 20, 12)
    [plain] = pools(1).run(ranks.fit, 1, None, "nothing", lengths)
    for found in pools(2).run(ranks.fit, 2, RING, "nothing", lengths):
        assert not found["whole"]
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-10)


def info(tokens):
    layout = SequenceLayout(2, 1)
    padded = layout.padded_length(tokens)
    return SequenceInfo(
        rows=1, length=tokens, padded_length=padded, boundaries=None, position_ids=None, shift_labels=None, layout=layout
    )  # fmt: skip


def test_which_batches_are_cut_elsewhere():
    batches = BatchesToTry()
    batches.expect(due=True)
    assert not batches.is_cut_elsewhere(info(16))
    batches.note_cut(info(16), alike=False)
    assert [batches.is_cut_elsewhere(info(each)) for each in (16, 15, 12, 8, 976)] == [False, False, True, True, False]
    batches.note_cut(info(12), alike=True)
    assert not batches.is_cut_elsewhere(info(8))


def test_a_fit_asks_for_so_many_trials_of_cuts_and_no_more():
    batches = BatchesToTry()
    batches.expect(due=True)
    asked = 0
    for tokens in range(4, 400, 4):
        asked += batches.is_cut_elsewhere(info(tokens))
        batches.note_cut(info(tokens), alike=False)
    assert asked <= 8


@pytest.mark.parametrize(
    ("layout", "tokens", "expected"),
    [
        (SequenceLayout(2, 1), 16, 12),
        (SequenceLayout(2, 1), 12, 12),
        (SequenceLayout(2, 1), 4096, 52),
        (SequenceLayout(1, 2), 10, 10),
        (SequenceLayout(2, 2), 8, 4),
    ],
)
def test_uneven_crops_have_pieces_that_no_group_divides(layout, tokens, expected):
    assert uneven_tokens(tokens, layout) == expected
