"""An optimizer that a step makes for itself trains as on one device; one that has shards is refused by its name."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.slow import slow
from tests.trainer.optimizers import own_optimizers_ranks as ranks

WHOLE = dict(ulysses_size=2, global_view=True)


@pytest.mark.parametrize("preflight", [True, *slow(False)])
def test_one_that_is_made_within_the_step_trains_as_on_one_device(pools, preflight):
    [expected] = pools(1).run(ranks.fit, "within", 1, None)
    for found in pools(2).run(ranks.fit, "within", 2, dict(**WHOLE, preflight=preflight)):
        assert not found["said"]
        assert found["seen"][-6:] == pytest.approx(expected["seen"], rel=1e-10)
        assert len(expected["seen"]) == 6
        for name, weight in expected["weights"].items():
            assert max_error(found["weights"][name], weight) < 1e-10, name


@pytest.mark.parametrize("strategy", [dict(**WHOLE, preflight=False), WHOLE])
def test_one_that_has_shards_is_refused(pools, strategy):
    for found in pools(2).run(ranks.fit, "before", 2, strategy):
        assert "training_step steps an optimizer of its own, Adam of probe.weight: " in found["said"]
        assert "automatic_optimization = False" in found["said"]
