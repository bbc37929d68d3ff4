"""Sounds of (rows, channels, times), whose sequence is the last dim."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_sp.testing import max_error
from tests.preflight import series_ranks as ranks


@pytest.mark.parametrize(("channels", "given"), [(1, {}), (8, {"sequence_dims": {"audio": 2}})], ids=["one", "named"])
def test_they_train_as_on_one_device(pools: Any, channels: int, given: dict[str, Any]):
    expected = pools(1).run(ranks.trained, 1, channels, {})[0]
    for found in pools(2).run(ranks.trained, 2, channels, {"ring_size": 2, "global_view": "auto", **given}):
        assert not isinstance(found, str), found
        assert max(max_error(value, expected[name]) for name, value in found.items()) <= 1e-10


def test_several_channels_may_be_tokens_and_the_refusal_shows_the_line(pools: Any):
    line = (
        "\nBy its shape alone audio of (2, 8, 32) was taken for 8 tokens of 32 features each; where the last dim is the sequence (channels, "
        "then time), say sequence_dims={'audio': 2}"
    )
    for global_view in ("auto", False):
        for said in pools(2).run(ranks.trained, 2, 8, {"ring_size": 2, "global_view": global_view}):
            assert said.endswith(line)
            assert said.count("By its shape") == 1
