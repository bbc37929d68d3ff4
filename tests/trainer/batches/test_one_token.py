"""Rows of one token, a step of decoding or a regression say, train as on one device: each rank holds padding beside it."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.trainer.batches import one_token_ranks as ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        dict(ring_size=2, global_view="auto"),
        dict(ulysses_size=2, global_view="auto"),
        dict(ring_size=2, global_view=True),
    ],
    ids=str,
)
def test_a_row_of_one_token_is_no_shifted_label(pools, strategy):
    cases = [dict(loss=name) for name in ranks.LOSSES]
    cases += [dict(loss=name, length=length) for name in ("first, of rows", "mean, of rows") for length in (2, 4)]
    alone = pools(1).run(ranks.runs, [dict(strategy=None, world=1, **case) for case in cases])[0]
    for answers in pools(2).run(ranks.runs, [dict(strategy=strategy, world=2, **case) for case in cases]):
        for case, actual, expected in zip(cases, answers, alone, strict=True):
            assert not actual["error"], (case, actual["error"])
            assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-10), case
            for name, weight in expected["weights"].items():
                assert max_error(actual["weights"][name], weight) < 1e-10, (case, name)
