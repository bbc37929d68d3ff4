"""What a data set draws by torch's own stream is the same on the ranks of a sequence, another in each group and epoch, and kept by a resume."""

from __future__ import annotations

import pytest

from tests.data.loaders import drawn_ranks as ranks


def test_ranks_of_a_sequence_draw_one_window(pools, tmp_path):
    one, other = pools(2).run(ranks.fit, {"ring_size": 2}, str(tmp_path), 0)
    assert one == other
    assert len(one) == 8
    assert len({str(each) for each in one}) == 8


@pytest.mark.slow
def test_a_resume_in_an_epoch_draws_what_the_run_would_have(pools, tmp_path):
    whole, _ = pools(2).run(ranks.fit, {"ring_size": 2}, str(tmp_path), 0)
    assert pools(2).run(ranks.fit, {"ring_size": 2}, str(tmp_path), 3)[0] == whole
