"""An epoch's mean weighs a batch by the first dim of its first tensor: by whole lengths, where that is the sequence."""

from __future__ import annotations

import pytest

from tests.trainer.logged_numbers import epoch_weights_ranks as ranks


def test_a_batch_of_tokens_first_weighs_its_whole_length(pools):
    [alone] = pools(1).run(ranks.fit, 1, None)
    dims = {"sequence_dims": {"input_ids": 0, "shift_labels": 0}}
    for of_rank in pools(2).run(ranks.fit, 2, dims):
        assert of_rank == pytest.approx(alone, abs=1e-12)
