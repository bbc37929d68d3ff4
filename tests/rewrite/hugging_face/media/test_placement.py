"""Tokens of images are placed into the text as on one device, wherever their placeholders lie; a wrong number is refused."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.rewrite.hugging_face.media import placement_ranks as ranks

# Behind each other, over the ranks' edges, two in a row of the batch and none in another, in long rows of which the preflight takes a part.
ROWS = {
    "one each": ([(0,), (11,), (3,), (20,)], 30),
    "two and none": ([(2, 15), (), (), (1, 19)], 29),
    "all over": ([(0,), (21,), (0, 10), (19,)], 30),
    "far behind": ([(150,), (170,), (140,), (180,)], 200),
}


# Each data-parallel group has an image in every batch: FSDP waits for a tower that one group did not run backward.
# The logits are made: in chunks the float32 loss of the model is rounded otherwise, which 1e-10 would see.
LOSS = {"loss_chunk_tokens": None}
CASES = [(rows, {"ring_size": 2, **LOSS}) for rows in ROWS] + [("one each", {"data_parallel_size": 2, **LOSS})]


@pytest.mark.parametrize(("rows", "strategy"), CASES)
def test_a_model_with_images_trains_as_on_one_device(pools, rows, strategy):
    (expected,) = pools(1).run(ranks.fit, 1, None, *ROWS[rows])
    for answer in pools(2).run(ranks.fit, 2, strategy, *ROWS[rows]):
        assert answer["error"] == ""
        errors = {n: max_error(answer["weights"][n], w) for n, w in expected["weights"].items()}
        assert max(errors.values()) < 1e-10, errors


def test_more_tokens_than_placeholders_are_refused(pools):
    # The second batch's images overlap, so that one of them has fewer placeholders.
    starts = [(0,), (11,), (3, 8), (20,)]
    for answer in pools(2).run(ranks.fit, 2, {"ulysses_size": 2}, starts, 30):
        assert (
            "the batch has 23 placeholders for images, videos or sounds in its text, and 27 tokens of them to place"
            in (answer["error"])
        )
