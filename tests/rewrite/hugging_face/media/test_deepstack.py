"""Features of a tower's inner layers: exact by the flows of Qwen3-VL and Granite Vision; what cannot be joined is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers.models.qwen3_vl")

from tests.rewrite.hugging_face.media import deepstack_ranks as ranks


def test_images_and_videos_in_one_batch_are_refused_by_name(pools):
    for message in pools(2).run(ranks.refusal, True, False):
        assert message.startswith("Qwen3VLForConditionalGeneration: the batch has images and videos"), message
        assert "give batches of images and batches of videos" in message


def test_on_parts_of_the_text_features_are_added_where_its_images_are(pools):
    """Without a global view, in which the rows are whole, the preflight compares it."""
    assert pools(2).run(ranks.refusal, False, True) == ["not refused"] * 2
