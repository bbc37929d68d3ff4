"""Before training: the numbers that a step logs are one device's, or they are named; a monitored one is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.preflight import training_numbers_ranks as ranks

RING, ULYSSES = (2, dict(ring_size=2)), (2, dict(ulysses_size=2))
GROUPS = pytest.param(4, dict(data_parallel_size=2, ring_size=2), marks=pytest.mark.slow)
LAYOUTS = [RING, pytest.param(*ULYSSES, marks=pytest.mark.slow), GROUPS]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "strategy"), LAYOUTS, ids=str)
def test_right_numbers_are_logged_without_a_word(pools: Any, world: int, strategy: dict[str, int]):
    (one,) = pools(1).run(ranks.trained, 1, ("right",), {})
    for rank, found in enumerate(pools(world).run(ranks.trained, world, ("right",), strategy)):
        assert (found["error"], found["said"], found["num_steps"]) == ("", [], 2)
        # What Lightning shows of a step's numbers; of two groups `reduced` is each group's own.
        names = {"val_loss", "reduced"} if world == 2 else {"val_loss"}
        for name in names:
            assert found["logged"][name] == pytest.approx(one["logged"][name], rel=1e-6), (rank, name)


# In `make test` those of a validation are (tests/preflight/evaluation/test_evaluation.py).
@pytest.mark.slow
@pytest.mark.parametrize(("world", "strategy"), LAYOUTS, ids=str)
def test_numbers_of_a_shard_are_named_in_a_warning(pools: Any, world: int, strategy: dict[str, int]):
    kinds = ("entropy", "metric", "padded", "weights")
    found, *others = pools(world).run(ranks.trained, world, kinds, strategy, "", 31)
    assert [each["error"] for each in (found, *others)] == [""] * world
    (said,) = found["said"]
    assert said.startswith("preflight: training_step on a crop of 2 x "), said
    listed = said.partition("than one device: ")[2].partition("; for a number that a rank makes")[0].split("; ")
    assert [each.partition(" =")[0] for each in listed] == [
        "entropy",
        "by_tokens (batch_size)",
        "of_all_targets",
        "total",
    ], said


@pytest.mark.parametrize(("world", "strategy"), [ULYSSES, GROUPS], ids=str)
def test_what_a_step_keeps_of_a_shard_is_named_in_a_warning(pools: Any, world: int, strategy: dict[str, int]):
    found, *others = pools(world).run(ranks.trained, world, ("right", "kept"), strategy)
    assert [(each["error"], each["num_steps"]) for each in (found, *others)] == [("", 2)] * world
    (said,) = found["said"]
    rows = 2 if world == 2 else 1  # of a group's crop
    assert f"self.num_tokens (attribute) = {16 * rows} (rank 0), on one device {32 * rows}" in said
    assert "self.memory of shape (2, " in said
    assert f"self.of_rows[0] of shape ({rows},) (attribute) = " in said
    assert said.count("(attribute) =") == 3, said
    assert "What a step leaves in an attribute is this rank's own" in said


def test_other_tokens_of_one_norm_are_told_apart(pools: Any):
    """A memory of the last states behind a norm: another rank's tokens have the same norm, and a later step reads them."""
    found, other = pools(2).run(ranks.trained, 2, ("right", "normed"), dict(ulysses_size=2))
    assert (found["error"], other["error"]) == ("", "")
    (said,) = found["said"]
    assert "self.normed of shape (2, 4, " in said


def test_a_monitored_number_of_a_shard_is_refused_on_all_ranks(pools: Any):
    for found in pools(2).run(ranks.trained, 2, ("right", "entropy"), dict(ring_size=2), "entropy_epoch"):
        assert "entropy_epoch is monitored: checkpoints, early stopping" in found["error"]
        assert found["num_steps"] == 0
    for found in pools(2).run(ranks.trained, 2, ("right",), dict(ring_size=2), "val_loss"):
        assert found["error"] == ""


def test_a_number_that_is_the_rounding_of_0_is_one_devices(pools: Any):
    for found in pools(2).run(ranks.trained, 2, ("right", "zero"), dict(ring_size=2), "zero_epoch"):
        assert (found["error"], found["said"]) == ("", [])
        assert 0 < abs(found["logged"]["zero_epoch"]) < 1e-12
