"""Weights that ranks begin with are one device's to the bit, and no rank holds more than its shard and one tensor on the way to them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.memory.initial_weights import Model
from lightning_sp.testing import RankPool
from tests.parallelize.delayed_init import delayed_ranks as ranks

BUILT = [
    ("all in configure_model", "32-true"),
    ("begun in __init__", "64-true"),
    ("all in configure_model", "bf16-true"),
]
# Options of the strategy, and which of these is built.
CASES = [({}, 0), ({"shard_size": 1}, 0), ({"delayed_init": False}, 0), ({}, 1), ({}, 2)]


def test_the_first_weights_are_those_of_one_device(pools):
    told = [dict(kind=kind, precision=precision) for kind, precision in BUILT]
    alone = pools(1).run(ranks.several, [dict(strategy=None, world=1, **each) for each in told])[0]
    one = dict(sequence_parallel_size=1, preflight=False)
    cases = [dict(strategy={**one, **layout}, world=2, **told[built]) for layout, built in CASES]
    for answers in pools(2).run(ranks.several, cases):
        for (layout, built), actual in zip(CASES, answers, strict=True):
            expected = alone[built]
            assert actual.keys() == expected.keys(), layout
            for name, value in actual.items():
                # A router that its forward casts is float32 before it is sharded; on one device after its first forward.
                like = expected[name].to(value.dtype) if "router" in name else expected[name]
                assert value.dtype == like.dtype, (layout, name)
                assert torch.equal(value, like), (layout, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("read", [False, True])
def test_no_rank_holds_more_than_its_shard_and_a_block(read, tmp_path):
    model = Model(blocks=12)
    if read:
        model.build().save_pretrained(tmp_path, max_shard_size="100MB")
    with RankPool(2, timeout_s=280) as pool:
        of_ranks = pool.run(ranks.set_up, Model(folder=str(tmp_path)) if read else model, True, {"preflight": False}, 2)
    for rank, found in enumerate(of_ranks):
        block = (found["whole"] - 2 * found["largest"]) // 12
        # Slack: what libraries make resident, and messages in transit.
        bound = found["shard"] + block + 16 * 2**20
        assert found["whole"] > 360 * 2**20 > 1.5 * bound
        assert found["shard"] <= found["peak"] < bound, (
            rank,
            {name: f"{value / 2**20:.0f} MiB" for name, value in found.items()},
        )
