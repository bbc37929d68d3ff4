"""A checkpoint in one file, of an epoch's end, is resumed under plain Lightning, and one of plain Lightning's is resumed here."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.checkpoint import plain_resume_ranks as ranks


def test_a_run_goes_on_there_and_here_as_on_one_device(pools, tmp_path):
    for answer in pools(2).run(ranks.go_on, str(tmp_path)):
        losses, weights = answer["one device"]
        for where in ("there", "here"):
            own, resumed = answer[where]
            assert own == pytest.approx(losses[4:], abs=1e-10), where
            assert all(max_error(resumed[name], weight) < 1e-10 for name, weight in weights.items()), where
