"""An average's further epoch, for the statistics of batch norms, leaves the weights of one device."""

from __future__ import annotations

from typing import Any

import torch

from tests.trainer.averages import swa_batch_norm_ranks as ranks


def test_the_weights_behind_an_epoch_without_a_backward_are_one_devices(pools: Any):
    ((expected, _),) = pools(1).run(ranks.fit, 1)
    for found, are_shards in pools(2).run(ranks.fit, 2):
        assert are_shards == [True] * 12
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-6, msg=name)
