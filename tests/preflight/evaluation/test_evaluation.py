"""Before an evaluation's first step: the numbers that it shows are one device's, or they are named; a monitored one is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_sp.preflight.numbers import RankNumbers, counted_once, differences
from lightning_sp.preflight.recording.logged import Number
from tests.preflight.evaluation import evaluation_ranks as ranks
from tests.slow import slow

LAYOUTS = [
    (2, dict(ring_size=2)),
    pytest.param(2, dict(ulysses_size=2), marks=pytest.mark.slow),
    (4, dict(data_parallel_size=2, ring_size=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "strategy"), LAYOUTS, ids=str)
def test_right_numbers_are_shown_without_a_word(pools: Any, world: int, strategy: dict[str, int]):
    (one,) = pools(1).run(ranks.shown, 1, "validate", ("right", "clock"), {})
    for rank, found in enumerate(pools(world).run(ranks.shown, world, "validate", ("right", "clock"), strategy)):
        assert (found["error"], found["said"]) == ("", [])
        # The crop has left nothing in the metrics, nor in an object of the user's own.
        assert found["num_steps"] == 2
        # Of two groups the others are each group's own, as Lightning logs what is not synchronized.
        compared = ("accuracy", "synced", "val_loss", "reduced", "of_mean", "own_sum")[: None if world == 2 else 2]
        for name in compared:
            assert found["logged"][name] == pytest.approx(one["logged"][name], rel=1e-6), (rank, name)


@pytest.mark.parametrize("run", ["fit", "validate", *slow("test")])
def test_numbers_of_a_shard_are_named_in_a_warning(pools: Any, run: str):
    kinds = ("right", "entropy", "summed", "metric", "returned")
    found, _ = pools(2).run(ranks.shown, 2, run, kinds, dict(ring_size=2))
    assert found["error"] == ""
    (said,) = found["said"]
    step = "test_step" if run == "test" else "validation_step"
    assert said.startswith(f"preflight: {step} on a crop of 2 x 32 tokens shows other numbers than one device: ")
    listed = said.partition("than one device: ")[2].partition("; for a number that a rank makes")[0].split("; ")
    assert [each.partition(" =")[0] for each in listed] == ["entropy", "norm (returned)", "total"]
    # What all ranks have counts once: as many batches as validation has.
    assert found["logged"]["summed"] == pytest.approx(found["num_steps"] * found["logged"]["val_loss"], rel=1e-6)
    assert "(rank 0), on one device" in listed[0]


def test_a_monitored_number_of_a_shard_is_refused_on_all_ranks(pools: Any):
    for found in pools(2).run(ranks.monitored, "entropy"):
        assert "entropy is monitored: checkpoints, early stopping or the learning rate would follow" in found["error"]
        assert found["num_steps"] == 0
    for found in pools(2).run(ranks.monitored, "val_loss"):
        assert found["error"] == ""


def test_a_number_is_not_hidden_by_a_metric_of_its_name_nor_by_how_it_is_logged(pools: Any):
    found, _ = pools(2).run(ranks.shown, 2, "validate", ("hidden",), dict(ring_size=2))
    (said,) = found["said"]
    listed = said.partition("than one device: ")[2].partition("; for a number that a rank makes")[0].split("; ")
    assert [each.partition(" =")[0] for each in listed] == ["accuracy", "alone"], said


@pytest.mark.slow
def test_what_a_rank_measures_for_itself_in_training_is_no_number_of_the_validation(pools: Any):
    for found in pools(2).run(ranks.timed):
        assert not found["ranks"], found["ranks"]
        assert "speed" in found["logged"]


def test_what_is_gathered_until_the_end_of_an_epoch_is_refused_where_it_is_monitored(pools: Any):
    for found in pools(2).run(ranks.monitored, "gathered", ("right", "gathered")):
        assert "the ranks of one sequence log other numbers after a validation: gathered = " in found["error"]
        assert "gathered is monitored" in found["error"]
    said = pools(2).run(ranks.shown, 2, "fit", ("right", "gathered"), dict(ring_size=2))[0]["ranks"]
    assert len(said) == 1
    assert said[0].startswith("the ranks of one sequence log other numbers after a validation: gathered = ")


def test_what_a_step_keeps_and_what_a_hook_does_to_the_batch_are_compared(pools: Any):
    found, _ = pools(2).run(ranks.shown, 2, "validate", ("kept", "masked"), dict(ring_size=2))
    said, kept = found["said"]
    listed = said.partition("than one device: ")[2].partition("; for a number that a rank makes")[0].split("; ")
    # Not the loss of targets that a hook has left out: it has them whole, in the trial too, which fails without what the hook adds.
    assert [each.partition(" =")[0] for each in listed] == ["self.of_rows[0] of shape (2,) (attribute)"]
    assert "What a step leaves in an attribute is this rank's own: a later step, or the end of the epoch" in said
    assert "keeps other values in lists or dicts of the module than one device: rank 0: " in kept


def test_a_buffer_that_a_step_counts_in_is_one_devices(pools: Any):
    (one,) = pools(1).run(ranks.shown, 1, "validate", ("counted",), {})
    for found in pools(2).run(ranks.shown, 2, "validate", ("counted",), dict(ring_size=2, global_view="auto")):
        assert (found["error"], found["ranks"]) == ("", [])
        assert found["logged"]["counted"] == pytest.approx(one["logged"]["counted"], rel=1e-6)


def test_a_step_that_draws_goes_on_in_the_global_view(pools: Any):
    found = pools(2).run(ranks.shown, 2, "validate", ("draws",), dict(ring_size=2, global_view="auto"))
    assert [(each["error"], each["said"], each["ranks"]) for each in found] == [("", [], [])] * 2
    assert found[0]["logged"]["of_chosen"] == found[1]["logged"]["of_chosen"] > 0


def test_a_metric_that_one_rank_alone_updates_is_left_out(pools: Any):
    for found in pools(2).run(ranks.shown, 2, "validate", ("rank 0",), dict(ring_size=2)):
        assert (found["error"], found["said"], found["num_steps"]) == ("", [], 2)


def test_a_step_that_fails_on_a_crop_is_not_compared_and_runs(pools: Any):
    strategy = dict(ring_size=2, preflight_tokens=8)
    for found in pools(2).run(ranks.shown, 2, "validate", ("fails", "entropy"), strategy):
        assert (found["error"], found["said"], found["num_steps"]) == ("", [], 2)


def test_it_is_switched_off_with_the_preflight(pools: Any):
    for found in pools(2).run(ranks.shown, 2, "validate", ("entropy",), dict(ring_size=2, preflight=False)):
        assert (found["error"], found["said"]) == ("", [])


def of_ranks(*values: tuple[float, float], reduced: str = "", sequence: int = 2, **more: Any) -> list[RankNumbers]:
    """Return numbers named "x" of ranks, each as (whole, sharded)."""
    return [
        RankNumbers(
            rank % sequence,
            {"x": Number(whole, reduced)},
            {"x": Number(more.get("again", whole), reduced)},
            {"x": Number(sharded, reduced)},
            more.get("in_16_bits", False),
        )
        for rank, (whole, sharded) in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        (of_ranks((1.0, 1.0), (1.0, 1.0)), []),
        (of_ranks((1.0, 1.0), (1.0, 2.0)), [("rank 1", 2.0, 1.0)]),
        (of_ranks((1.0, 0.5), (1.0, 1.5), reduced="mean"), []),
        (of_ranks((1.0, 0.4), (1.0, 0.6), reduced="sum"), []),
        # What both ranks have counts once; what neither way is one device's is named.
        (of_ranks((1.0, 1.0), (1.0, 1.0), reduced="sum"), []),
        (of_ranks((1.0, 1.5), (1.0, 1.5), reduced="sum"), [("sum of the ranks", 3.0, 1.0)]),
        # Two groups of two ranks: each group's whole number counts once.
        (of_ranks((1.0, 1.0), (1.0, 1.0), (3.0, 3.0), (3.0, 3.0), reduced="mean"), []),
        (of_ranks((1.0, 0.5), (1.0, 0.5), (3.0, 1.0), (3.0, 2.0), reduced="sum"), []),
        (of_ranks((1.0, 1.0), (1.0, 0.0), (3.0, 3.0), (3.0, 2.0), reduced="max"), []),
        # A time, and what is not finite whole, cannot be judged.
        (of_ranks((1.0, 2.0), (1.0, 2.0), again=1.5), []),
        (of_ranks((float("nan"), 2.0), (float("nan"), 2.0)), []),
        # One token more or less is rounding in 16 bits.
        (of_ranks((0.05, 0.1), (0.05, 0.1), in_16_bits=True), []),
        (of_ranks((0.05, 0.1), (0.05, 0.1)), [("rank 0", 0.1, 0.05)]),
    ],
)
def test_what_differs(numbers: list[RankNumbers], wanted: list[tuple[str, float, float]]):
    found = differences(numbers)
    assert [(each.shown.value, each.wanted) for each in found] == [(shown, whole) for _, shown, whole in wanted]
    assert all(f"({how})" in each.describe() for each, (how, _, _) in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        (of_ranks((1.0, 1.0), (1.0, 1.0), reduced="sum"), {"x": True}),
        (of_ranks((1.0, 0.5), (1.0, 0.5), reduced="sum"), {"x": False}),
        (of_ranks((2.0, 2.0), (2.0, 2.0), (3.0, 3.0), (3.0, 3.0), reduced="sum"), {"x": True}),
        (of_ranks((2.0, 1.5), (2.0, 0.5), (3.0, 3.0), (3.0, 0.0), reduced="sum"), {"x": False}),
        # Both, neither, of no sequence that ranks share, and what is no sum.
        (of_ranks((0.0, 0.0), (0.0, 0.0), reduced="sum"), {}),
        (of_ranks((1.0, 1.5), (1.0, 1.5), reduced="sum"), {}),
        (of_ranks((1.0, 1.0), (1.0, 1.0), reduced="sum", sequence=1), {}),
        (of_ranks((1.0, 1.0), (1.0, 1.0), reduced="mean"), {}),
        (of_ranks((float("nan"), 1.0), (float("nan"), 1.0), reduced="sum"), {}),
    ],
)
def test_which_sums_the_ranks_of_a_sequence_have_together(numbers: list[RankNumbers], wanted: dict[str, bool]):
    assert counted_once(numbers) == wanted


def test_a_number_that_a_rank_lacks_is_compared_where_it_is():
    numbers = of_ranks((1.0, 1.0), (1.0, 3.0))
    numbers[0] = RankNumbers(0, {}, {}, {}, False)
    (found,) = differences(numbers)
    assert (found.rank, found.shown.value) == (1, 3.0)
