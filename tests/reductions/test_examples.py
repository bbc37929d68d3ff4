"""Each example of examples/losses trains as on one device: weights and logged losses, on every way to deal rows and tokens."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.testing import max_error
from tests.reductions import example_ranks as ranks

LAYOUTS = {
    "2 x 1": (2, dict(data_parallel_size=2, sequence_parallel_size=1, preflight=False)),
    "1 x 2, ulysses": (2, dict(ulysses_size=2, preflight=False)),
    "1 x 2, ring": (2, dict(ring_size=2)),
    "2 x 2": (4, dict(data_parallel_size=2, ring_size=2, preflight=False)),
}
# Data-parallel groups alone and a ring alone run all, the ring with the preflight; Ulysses every other one, and the slow test the other half.
FEW = {"1 x 2, ulysses": list(ranks.EXAMPLES)[::2], "2 x 2": list(ranks.EXAMPLES)[1::2]}


@pytest.fixture(scope="module")
def one_device():
    torch.set_num_threads(1)
    return {name: ranks.fit(name, None) for name in ranks.EXAMPLES}


@pytest.mark.parametrize(
    "layout",
    ["2 x 1", *(pytest.param(each, marks=pytest.mark.slow) for each in ("1 x 2, ulysses", "1 x 2, ring", "2 x 2"))],
)
def test_an_example_trains_as_on_one_device(pools, one_device, layout):
    hold(pools, one_device, layout, FEW.get(layout, list(ranks.EXAMPLES)))


def test_a_filler_without_a_target_is_not_taken_for_rows(pools, one_device):
    """Of targets that are all ignored each rank of its sequence makes the same: 0 / 0."""
    hold(pools, one_device, "2 x 2", ["tokens.Weighed"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", FEW)
def test_every_example_in_every_layout(pools, one_device, layout):
    hold(pools, one_device, layout, [name for name in ranks.EXAMPLES if name not in FEW[layout]])


def hold(pools, one_device, layout, names):
    world, strategy = LAYOUTS[layout]
    for answers in pools(world).run(ranks.fits, names, strategy, world):
        assert list(answers) == names
        for name, answer in answers.items():
            assert not answer["error"], (name, answer["error"])
            wanted = one_device[name]
            assert len(answer["losses"]) == ranks.STEPS
            assert answer["losses"] == pytest.approx(wanted["losses"], abs=1e-10), name
            errors = {n: max_error(answer["weights"][n], weight) for n, weight in wanted["weights"].items()}
            assert max(errors.values()) < 1e-10, (name, errors)


def test_the_examples_learn_something(one_device):
    for name, answer in one_device.items():
        assert len(set(answer["losses"])) == ranks.STEPS, (name, answer["losses"])
