"""A loss that is nan is said to be, with the layer that made it first; training goes on as on one device."""

from __future__ import annotations

import pytest

from lightning_sp.testing import RankPool
from tests.slow import slow
from tests.step import watch_ranks as ranks

SAYS = {
    "layer": ["model.divides is the first module", "61 of ", "its inputs and its own parameters are finite"],
    "weight": ["model.body.layers.1.attention_norm is the first module", "its weight is not finite"],
    "dropout": ["run once more it is finite: dropout, which is off then"],
    "another batch": ["the micro-batch could not be run once more: KeyError: 'what the first run took'"],
    "step": ["no module's output is nan or plus infinity: training_step itself"],
    "targets": ["a mean cross entropy has no target, for all of this micro-batch are ignored; its gradient is zeros"],
}


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *slow(("layer", dict(ring_size=2)), ("layer", dict(ulysses_size=2, data_parallel_size=2))),
        ("weight", dict(ulysses_size=2)),
        ("step", dict(ring_size=2)),
        *slow(("dropout", dict(ring_size=2)), ("another batch", dict(ulysses_size=2)), ("targets", dict(ring_size=2))),
    ],
    ids=str,
)
def test_the_layer_is_named_once_until_the_loss_is_finite_again(pools, kind, strategy):
    world = 2 * strategy.get("data_parallel_size", 1)
    answers = pools(world).run(ranks.non_finite, kind, dict(preflight_tokens=8, **strategy))
    assert [each["steps"] for each in answers] == [4] * world
    (said,), *others = [each["said"] for each in answers]
    assert others == [[]] * (world - 1), "rank 0 alone says it"
    assert said.startswith("training_step's loss is nan or infinite; ")
    assert all(each in said for each in SAYS[kind]), said


@pytest.mark.slow
def test_a_second_run_that_fails_on_one_rank_ends_the_run():
    """The other rank waits in the middle of its own: to go on would mix its collectives with those of the next step."""
    with (
        RankPool(2, timeout_s=60, others_s=1.0) as pool,
        pytest.raises(
            RuntimeError,
            match=r"MemoryError: on this rank alone \(on this rank; ranks \[0\] wait for it in a collective",
        ),
    ):
        pool.run(ranks.fails_soon, 1.0, dict(ring_size=2, preflight=False))


@pytest.mark.slow
def test_a_finite_loss_runs_no_forward_more(pools):
    never = [each["forwards"] for each in pools(2).run(ranks.non_finite, "never", dict(ring_size=2, preflight=False))]
    once = [each["forwards"] for each in pools(2).run(ranks.non_finite, "layer", dict(ring_size=2, preflight=False))]
    assert never == [4, 4]
    assert once == [4, 4], "what the step run once more has counted is put back"
