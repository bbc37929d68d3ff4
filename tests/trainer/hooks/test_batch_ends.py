"""Hooks at a batch's end are handed one device's outputs and batch, and are their users' own again after a run."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from lightning_sp.trainer.hooks.replaced_hooks import reads_argument
from tests.slow import slow
from tests.trainer.hooks import batch_end_ranks as ranks


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for kind, values in wanted.items():
        assert len(found[kind]) == len(values) > 0, kind
        for a, b in zip(found[kind], values, strict=True):
            assert a == (b if isinstance(b, tuple) else pytest.approx(b, abs=1e-10)), kind


@pytest.mark.parametrize(
    "strategy",
    [
        dict(ring_size=2),
        *slow(dict(ring_size=2, global_view=True)),
        pytest.param(dict(ulysses_size=2, preflight=False), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [32, *slow(29)])
def test_outputs_and_batch_are_one_devices(pools, strategy, length):
    [expected] = pools(1).run(ranks.run, None, 1, length)
    for actual in pools(2).run(ranks.run, strategy, 2, length):
        assert not actual["error"], actual["error"]
        same(actual["seen"], expected["seen"])
        assert actual["left"] == []
        assert len(actual["module"]) == len(expected["module"]) > 0
        for a, b in zip(actual["module"], expected["module"], strict=True):
            assert a == pytest.approx(b, abs=1e-10)
        assert actual["logged"] == pytest.approx(expected["logged"], abs=1e-6)
        for name, weight in expected["weights"].items():
            assert max_error(actual["weights"][name], weight) < 1e-10


@pytest.mark.slow
def test_outputs_that_are_no_tokens_are_one_devices_in_the_global_view(pools):
    [expected] = pools(1).run(ranks.run, None, 1, 32, True)
    for actual in pools(2).run(ranks.run, dict(ring_size=2, global_view="auto"), 2, 32, True):
        assert not actual["error"], actual["error"]
        for kind in ("validation", "test", "predict"):
            same({kind: actual["seen"][kind]}, {kind: expected["seen"][kind]})


def test_a_number_of_each_row_that_a_training_step_returns_is_one_devices(pools):
    [expected] = pools(1).run(ranks.each_row, 1, {})
    for actual in pools(2).run(ranks.each_row, 2, {"ring_size": 2, "global_view": "auto"}):
        assert actual == pytest.approx(expected, rel=1e-10)


class Hooks:
    def ignores(self, *_):
        return 3

    def ignores_named(self, outputs, batch, batch_idx):
        return batch_idx

    def reads_batch(self, outputs, batch, batch_idx):
        return len(batch)

    def hands_on(self, *args):
        return self.ignores(*args)

    def closes_over(self, outputs, batch, batch_idx):
        return lambda: outputs


def test_which_arguments_a_hook_reads_is_seen_in_its_code():
    hooks = Hooks()
    found = {
        name: (reads_argument(getattr(hooks, name), 0), reads_argument(getattr(hooks, name), 1))
        for name in vars(Hooks)
        if "_" not in name[:2]
    }
    assert found == {
        "ignores": (False, False), "ignores_named": (False, False), "reads_batch": (False, True), "hands_on": (True, True),
        "closes_over": (True, False),
    }  # fmt: skip
    assert reads_argument(lambda trainer, module, *args: args, 2)
    assert not reads_argument(lambda *_: None, 2)
    assert reads_argument(print, 0)
