"""A backward hook of a module or a tensor has a part's gradient: that is said, with lines that give the whole."""

from __future__ import annotations

import pytest

from tests.trainer.hooks import backward_hook_ranks as ranks


@pytest.mark.parametrize("strategy", [dict(ring_size=2), dict(ulysses_size=2, preflight=False)], ids=str)
def test_what_a_hook_keeps_is_one_devices_by_the_lines_that_a_warning_names(pools, strategy):
    [expected] = pools(1).run(ranks.fit, None, 1)
    found = pools(2).run(ranks.fit, strategy, 2)
    for actual in found:
        assert actual["whole"] == pytest.approx(expected["whole"], rel=1e-10)
        assert actual["own"] != pytest.approx(expected["own"], rel=1e-2)
    [said] = found[0]["said"]
    assert said.startswith(
        "1 backward hooks of modules (model.layers.0.attention_norm) have the gradients of this rank's part"
    )
    assert "strategy.unshard(gradient) / 2 in the hook" in said
    assert expected["said"] == []


def test_what_a_hook_of_a_tensor_keeps_is_said_to_be_a_parts(pools):
    [expected] = pools(1).run(ranks.fit, None, 1, True)
    found = pools(2).run(ranks.fit, dict(ring_size=2), 2, True)
    for actual in found:
        # The preflight's runs are behind: steps alone count.
        assert actual["whole"][-3:] == pytest.approx(expected["whole"], rel=1e-10)
        assert actual["own"][-3:] != pytest.approx(expected["own"], rel=1e-2)
    [said] = found[0]["said"]
    assert said.startswith("a hook of a tensor in backward_hook_ranks.py:")
    assert "strategy.unshard(gradient) / 2 in the hook" in said
    assert expected["said"] == []
