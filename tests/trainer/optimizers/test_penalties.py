"""A penalty on the weights inside of a training step is one device's, wherever the weights are."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.trainer.optimizers import penalty_ranks as ranks


def same(actual, expected, case):
    assert not actual["error"], (case, actual["error"])
    assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-10), case
    assert actual["logged"] == pytest.approx(expected["logged"], abs=1e-10), case
    assert len(actual["grads"]) == len(expected["grads"]) > 0
    for found, wanted in zip(actual["grads"], expected["grads"], strict=True):
        assert found.keys() == wanted.keys(), case
        for name, grad in wanted.items():
            assert max_error(found[name], grad) < 1e-10, (case, name)
    for name, weight in expected["weights"].items():
        assert max_error(actual["weights"][name], weight) < 1e-10, (case, name)


def hold(pools, strategy, world, cases, micro=2):
    alone = pools(1).run(ranks.runs, [dict(strategy=None, world=1, micro=2 * micro, **case) for case in cases])[0]
    dp = strategy.get("data_parallel_size", 1)
    given = [dict(strategy=strategy, world=world, micro=2 * micro // dp, **case) for case in cases]
    for answers in pools(world).run(ranks.runs, given):
        for case, actual, expected in zip(cases, answers, alone, strict=True):
            same(actual, expected, case)


EACH = [dict(penalty=name) for name in ranks.PENALTIES]
# Added up, so that one fit tries several: each alone is slow.
NAMES = list(ranks.PENALTIES)
SUMS = [dict(penalty=" + ".join(NAMES[i::3])) for i in range(3)]
FEW = "l1 + l2_in_place + norms + ewc + ewc_of_shards + orthogonality + of_this_data"


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([SUMS[0], dict(penalty="l2", first=True)], id="most"),
        pytest.param(SUMS[1:], id="more", marks=pytest.mark.slow),
    ],
)
def test_a_penalty_is_one_devices(pools, cases):
    hold(pools, dict(ring_size=2), 2, cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        dict(ring_size=2, global_view=True),
        dict(ring_size=2),
        dict(ulysses_size=2),
        dict(ulysses_size=2, preflight=False, activation_checkpointing="full"),
        dict(data_parallel_size=2),
        dict(ring_size=2, shard_size=1),
    ],
    ids=str,
)
def test_it_is_in_other_layouts(pools, strategy):
    hold(pools, strategy, 2, EACH if strategy.get("global_view") is None else [dict(penalty=FEW)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        dict(data_parallel_size=2, ring_size=2),
        dict(data_parallel_size=2, ulysses_size=2, shard_size=2, global_view=True),
    ],
    ids=str,
)
def test_it_is_beside_accumulation_and_clipping(pools, strategy):
    """The penalty's gradient is there before FSDP2 has reduced the last micro-batch's, and counts once."""
    options = dict(accumulate_grad_batches=2, gradient_clip_val=0.5, size=16)
    hold(pools, strategy, 4, [dict(penalty=FEW, **options, first=first) for first in (False, True)])
