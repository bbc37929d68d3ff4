"""Towers that some data-parallel groups have no image for; that they train as on one device is a flow, llava_images_and_text."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.parallelize.fsdp.units import optional_units_ranks as ranks

pytest.importorskip("transformers")


def test_the_units_of_a_tower_are_optional_and_those_of_text_are_not(pools):
    for of_llava, of_text in pools(2).run(ranks.units):
        assert of_llava == ["CLIPVisionEmbeddings", "CLIPEncoderLayer", "CLIPEncoderLayer"]
        assert of_text == []


def test_manual_optimization_is_refused_on_all_ranks(pools):
    for message in pools(2).run(ranks.manual):
        assert message.startswith("data-parallel groups hold other entries in this batch, images say: with manual"), (
            message
        )
        assert "automatic optimization" in message


@pytest.mark.slow
def test_a_tower_that_no_trial_has_seen_is_refused_on_all_ranks(pools):
    for message in pools(4).run(ranks.unseen):
        assert "before the first batch that holds them" in message, message


@pytest.mark.slow
def test_a_tower_that_a_later_batch_calls_first_is_tried_before_it(pools):
    (expected,) = pools(1).run(ranks.seen_later, 1)
    for found in pools(4).run(ranks.seen_later, 4):
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert max_error(found[name], weight) < 1e-10, name
