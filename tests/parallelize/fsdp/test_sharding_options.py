"""The options of FSDP2's units: when they are gathered, how far ahead, and in which dtype gradients are summed."""

from __future__ import annotations

import pytest
import torch

from tests.parallelize.fsdp import sharding_options_ranks as ranks

# Gathers of a block and of the head in a step, and layers that are whole after a forward, of 2 blocks with two and a head.
RESHARD = {"auto": (2, 1, 1), True: (2, 2, 0), False: (1, 1, 5)}


@pytest.mark.parametrize("reshard", RESHARD)
def test_units_are_freed_between_forward_and_backward_or_not(pools, reshard):
    block, head, whole = RESHARD[reshard]
    for worst, calls, found in pools(2).run(ranks.law, "separate", (2,), dict(reshard_after_forward=reshard)):
        assert worst <= 1e-10
        assert (calls["all_gather blocks.0"], calls["all_gather head"], found) == (block, head, whole)


PAIRS = [
    dict(prefetch_blocks=1),
    dict(prefetch_blocks=3),
    dict(prefetch_blocks=2, reshard_after_forward=False),
    dict(prefetch_blocks=2, reshard_after_forward=True),
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(pytest.param("separate", options, id=f"separate-{options}") for options in PAIRS),
        *(
            pytest.param("twice", options, id=f"twice-{options}", marks=[pytest.mark.slow] * (options is not PAIRS[1]))
            for options in PAIRS
        ),
    ],
)
def test_gradients_are_one_process(pools, kind, options):
    assert all(worst <= 1e-10 for worst, _, _ in pools(2).run(ranks.law, kind, (2,), options))


@pytest.mark.parametrize("options", [dict(reshard_after_forward=False), PAIRS[1]], ids=str)
def test_gradients_are_one_process_where_parameters_are_replicated_too(pools, options):
    assert all(worst <= 1e-10 for worst, _, _ in pools(4).run(ranks.law, "separate", (2, 2), options))


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("dtype", "summed"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_gradients_are_summed_in_the_dtype_that_is_given(pools, dtype, summed, micro_batches):
    for actual, expected in pools(2).run(ranks.summed, getattr(torch, dtype), summed, micro_batches):
        for name, gradient in expected.items():
            assert torch.equal(actual[name], gradient), name
