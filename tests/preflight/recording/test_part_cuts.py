"""A step that cuts tokens by a number of Python's sees whole sequences, whatever decides the number, and from the first step on."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.preflight.recording.numbers_read.cut_dims import lengths_not_cut
from lightning_sp.preflight.recording.numbers_read.lines_of_parts import cuts_of_parts
from lightning_sp.preflight.recording.numbers_read.read_numbers import ReadNumbers
from tests.preflight.recording import part_cuts_ranks as ranks


def assert_same(found, plain):
    assert not found["error"]
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-10)
    for name, weight in plain["weights"].items():
        assert (found["weights"][name] - weight).abs().max() <= 1e-10, name


SLOW = [
    pytest.param(kind, marks=pytest.mark.slow)
    for kind in ("loop", "positions", "state", "batches", "buffer", "smaller")
]


@pytest.mark.parametrize("kind", ["gradients", "metric", *SLOW])
def test_whatever_decides_the_number(pools, kind):
    (plain,) = pools(1).run(ranks.fit, kind, None)
    for found in pools(2).run(ranks.fit, kind, {"ring_size": 2, "global_view": "auto"}):
        assert_same(found, plain)
        assert found["whole"]


@pytest.mark.slow
def test_pieces_and_lengths_of_the_part_itself_need_no_whole(pools):
    (plain,) = pools(1).run(ranks.fit, "pieces", None)
    for found in pools(2).run(ranks.fit, "pieces", {"ring_size": 2, "global_view": "auto"}):
        assert_same(found, plain)
        assert not found["whole"]


@pytest.mark.slow
def test_without_a_global_view_a_warning_has_the_line(pools):
    found = pools(2).run(ranks.fit, "buffer", {"ring_size": 2, "global_view": False})
    assert "training_step cuts tokens by a number of Python's" in found[0]["warned"]
    assert "part_cuts_ranks.py:" in found[0]["warned"]


def test_a_cut_to_fewer_tokens_is_named_for_what_it_is(pools):
    for found in pools(2).run(ranks.fit, "short", {"ring_size": 2, "global_view": False}):
        assert "over as many tokens whatever the length of the batch" in found["error"]
        assert "a step that cuts its tokens to a number" in found["error"]


@pytest.mark.slow
def test_a_set_of_tokens_decides_on_whole_sequences(pools):
    (plain,) = pools(1).run(ranks.fit, "elements", None)
    for found in pools(2).run(ranks.fit, "elements", {"ring_size": 2, "global_view": "auto"}):
        assert_same(found, plain)
        assert found["whole"]


@pytest.mark.slow
def test_without_a_global_view_a_set_of_tokens_is_refused(pools):
    for found in pools(2).run(ranks.fit, "elements", {"ring_size": 2, "global_view": False}):
        assert "decides by a number of its tokens, at part_cuts_ranks.py:" in found["error"]
        assert "(self.met |= set(ids[:, 0].tolist()))" in found["error"]


def test_without_a_global_view_a_warning_has_how_long_a_list_of_texts_is(pools):
    found = pools(2).run(ranks.fit, "texts", {"ring_size": 2, "global_view": False})
    assert "shows other numbers than one device: len(self.texts) (attribute)" in found[0]["warned"]


def test_a_queue_that_begins_empty_and_holds_tensors(pools):
    (plain,) = pools(1).run(ranks.fit, "queue", None)
    for found in pools(2).run(ranks.fit, "queue", {"ring_size": 2, "global_view": "auto"}):
        assert_same(found, plain)


@pytest.mark.parametrize(
    ("index", "found"),
    [
        ((slice(None), slice(None, 9)), [8]),
        ((slice(None), slice(None, 8)), []),
        ((slice(None), slice(None, 7)), []),
        ((slice(None), slice(None, 0)), [8]),
        ((..., slice(9, None)), [5]),
        ((slice(None), slice(0, None), None), [8]),
        ((slice(None), slice(-9, None)), [8]),
        ((slice(None), slice(0, 100)), []),
        (slice(None, 4), [3]),
        ((None, 0, slice(None, 9)), [8]),
        (3, []),
    ],
)
def test_indices_that_take_all_or_nothing(index, found):
    assert lengths_not_cut((3, 8, 5), index) == found


def test_the_first_of_chosen_tokens_are_others_in_a_part():
    """An expert takes the first of the tokens that chose it, up to a number that no crop reaches."""
    runs = []
    for ids in (torch.arange(16).view(1, 16), torch.arange(8).view(1, 8)):
        read = ReadNumbers()
        read.hand(((ids,), {}))
        with read:
            _ = (ids % 2 == 1).nonzero()[:100]
        runs.append(read)
    [line] = cuts_of_parts(*runs)
    assert "test_part_cuts.py:" in line
