"""torch.func of sharded weights is refused with its reason; each row's gradient after the other is one device's."""

from __future__ import annotations

import pytest

from tests.trainer.batches import transforms_ranks as ranks


@pytest.mark.parametrize("how", ["of a head", "of a model"])
def test_a_transform_of_sharded_weights_is_refused_with_what_is_carried(pools, how):
    for found in pools(2).run(ranks.fit, how, 2):
        assert (
            "torch.func (grad, vmap, jvp, jacrev, functional_call) was handed weights that are sharded"
            in found["error"]
        )
        assert "[torch.autograd.grad(each, weights, retain_graph=True) for each in losses]" in found["error"]


def test_gradients_of_row_by_row_are_one_devices(pools):
    [plain] = pools(1).run(ranks.fit, "row by row", 1)
    for found in pools(2).run(ranks.fit, "row by row", 2):
        assert not found["error"]
        for name, each in plain["weights"].items():
            assert (found["weights"][name] - each).abs().max() <= 1e-10, name
