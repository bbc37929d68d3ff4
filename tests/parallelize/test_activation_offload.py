"""Inputs of checkpointed blocks in a file: gradients are bitwise those without, at most a horizon of them is in memory, nothing is left."""

from __future__ import annotations

import pytest

from tests.parallelize import activation_offload_ranks as ranks

LAYERS, STEPS, MICRO = 5, 2, 2


# What a kind changes of an input is one thing, when it leaves another.
USUAL = ((1, ""), (2, ""), (2, "bfloat16"))


@pytest.mark.parametrize(
    ("horizon", "kind"),
    [
        pytest.param(horizon, kind, id=f"{horizon}-{kind}", marks=[pytest.mark.slow] * ((horizon, kind) not in USUAL))
        for horizon in (1, 2, 9)
        for kind in ("", "shared", "transposed", "bfloat16")
    ],
)
def test_gradients_are_bitwise_equal_and_a_horizon_is_in_memory(pools, tmp_path, kind, horizon):
    for found in pools(2).run(ranks.law, kind, horizon, True, str(tmp_path)):
        assert found["equal"]
        # Of what blocks share the first one's copy leaves too; the others keep it.
        assert found["put"] == STEPS * MICRO * (LAYERS + (kind == "shared"))
        assert found["most"] <= horizon
        assert found["bytes"] == MICRO * (LAYERS + (kind == "shared")) * 4 * 3 * 8 * (2 if kind == "bfloat16" else 4)
        assert found["alive"] == 0
        assert found["left"] == found["threads"] == []


@pytest.mark.parametrize("horizon", [1, 3])
def test_at_most_a_horizon_of_inputs_is_on_its_way_out(pools, tmp_path, horizon):
    assert pools(1).run(ranks.leaving, str(tmp_path), horizon) == [horizon]


def test_an_input_that_is_written_to_before_it_has_left_is_refused_as_by_torch(pools, tmp_path):
    for message in pools(1).run(ranks.written_to, str(tmp_path)):
        assert "modified by an inplace operation: the input (2, 3, 8) of a checkpointed block" in message


def test_a_full_disk_leaves_the_rest_in_memory(pools, tmp_path):
    [(equal, told)] = pools(1).run(ranks.full_disk, str(tmp_path))
    assert equal
    assert "No space left on device; the inputs of further blocks stay in memory" in told


def test_a_disk_without_room_is_refused_on_all_ranks(pools, tmp_path):
    for message in pools(2).run(ranks.no_room, str(tmp_path)):
        assert message.startswith("activation_offload='disk': 2 ranks of "), message
        assert "need 0.0 MiB for the inputs of 5 blocks, and " in message


def test_a_folder_that_one_rank_lacks_is_refused_on_all_ranks(pools, tmp_path):
    for message in pools(2).run(ranks.no_folder, str(tmp_path)):
        assert "activation_offload='disk' cannot write to offload_folder=" in message
        assert "absent" in message


def test_nothing_is_left_of_a_step_that_failed(pools, tmp_path):
    assert pools(1).run(ranks.fails, str(tmp_path)) == [[]]


def test_steps_of_many_lengths_take_no_more_than_the_longest(pools, tmp_path):
    [(in_file, of_longest, in_buffers)] = pools(1).run(ranks.lengths, str(tmp_path))
    assert in_file == of_longest
    assert in_buffers == 5


@pytest.mark.slow
def test_the_peak_is_that_of_a_horizon_of_blocks(pools, tmp_path):
    x = 4096 * 128 * 4

    def of_layers(horizon):
        [few] = pools(1).run(ranks.peak_bytes, 4, horizon, str(tmp_path))
        [many] = pools(1).run(ranks.peak_bytes, 16, horizon, str(tmp_path))
        return (many - few) / x

    assert of_layers(None) == pytest.approx(12, abs=1.5)
    # How many blocks wait to be written is the disk's: up to a horizon of either number of layers, and the one that is being written.
    assert abs(of_layers(2)) < 2 * 2
