"""A model that shifts labels by hand, and leaves out what the mask hides: its loss and gradients are those of one process."""

from __future__ import annotations

import pytest

from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.rewrite.hugging_face.media import sounds_ranks as ranks


@pytest.mark.parametrize("layout", [{"ring_size": 2}, {"ulysses_size": 2}], ids=["ring", "ulysses"])
def test_every_gradient_is_that_of_one_process(pools, layout):
    case = dict(kind="text", strategy={**layout, "preflight": False})
    one = ranks.one_process(**case)
    for (answer,) in pools(2).run(ranks.sharded, [case]):
        assert not answer["error"], answer["error"]
        assert abs(answer["losses"][-1] - one["loss"]) <= 1e-10
        names = sorted(one["grads"])
        assert_sharded_equals_unsharded([answer["grads"][n] for n in names], [one["grads"][n] for n in names], names)
