"""What a budget allows: pure functions of numbers; and where a budget comes from."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace

import pytest
import torch

from benchmarks.memory.checkpointing import measure
from lightning_sp.config import StrategyConfig
from lightning_sp.models import LlamaConfig
from lightning_sp.parallelize.memory.memory_budget import budget_bytes, used_bytes
from lightning_sp.parallelize.memory.memory_prediction import (
    CANDIDATES,
    BlockBytes,
    ModelBytes,
    StepBytes,
    as_options,
    bytes_per_token,
    cast_bytes,
    cheapest_policy,
    estimated_step,
    moments,
    of_each_block,
    peak_bytes,
    step_bytes,
    tile_bytes,
)
from lightning_sp.testing import RankPool

BLOCK = BlockBytes(kept=1000, attention=150, inputs=50)
STEP = StepBytes(tokens=10, blocks=(BLOCK,) * 8, outside=200)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("none", "nnnnnnnn"), ("every_4", "snnnsnnn"), ("every_2", "snsnsnsn"), ("every_3", "snnsnnsn"), ("selective", "ssssssss"),
        ("full", "ffffffff"), ("full_tiled", "ffffffff"), ("full_offloaded", "ffffffff"), ("every_9", "snnnnnnn"),
    ],
)  # fmt: skip
def test_a_policy_says_how_each_block_recomputes_itself(policy, expected):
    assert "".join(how[0] for how in of_each_block(policy, 8)) == expected


def test_a_token_adds_what_blocks_keep_one_that_is_computed_again_its_gradients_and_the_rest():
    # Of 10 tokens: eight blocks; or some of them by 200 each, and one of 1000 at a time; or by their inputs. Then gradients of 500, and 200.
    blocks = [8000, 2 * 200 + 6000 + 800, 4 * 200 + 4000 + 800, 8 * 200 + 800, *[8 * 50 + 950] * 3]
    expected = [each + 500 + 200 for each in blocks]
    assert [bytes_per_token(policy, STEP) for policy in CANDIDATES] == [each / 10 for each in expected]


def test_blocks_that_did_not_run_and_those_of_other_sizes_count_as_they_are():
    step = StepBytes(tokens=1, blocks=(None, BLOCK, BlockBytes(kept=10, attention=1, inputs=2)), outside=0)
    assert bytes_per_token("none", step) == 1010 + 500
    assert bytes_per_token("selective", step) == 203 + 800 + 500
    assert bytes_per_token("every_2", step) == 1000 + 3 + 7 + 500  # the last one alone is computed again


def test_the_peak_is_the_most_of_the_forwards_end_and_the_backwards_begin_and_end():
    block = BlockBytes(kept=1000, attention=150, inputs=50, casts=70)
    step = StepBytes(tokens=10, blocks=(block,) * 8, outside=200, outside_casts=30)
    for gradients in (0, 900, 9_000):
        model = ModelBytes(base=10_000, gradients=gradients, optimizer=500, gathered=50)
        for policy, kept in (("none", 8000), ("selective", 8 * 200), ("full", 8 * 50)):
            casts = 8 * 70 if policy == "none" else 0
            forward = 10_550 + gradients + casts + 30 + 20 * (kept + 200) // 10
            begin = 10_550 + cast_bytes(policy, step) + 20 * bytes_per_token(policy, step)
            end = 10_550 + gradients + 2 * 70 + 20 * 1500 // 10
            assert [each.at(20) for each in moments(policy, step, model)] == [forward, begin, end]
            assert peak_bytes(policy, step, model, 20) == max(forward, begin, end)
            freed = replace(model, steps_in_backward=True)
            assert [each.at(20) for each in moments(policy, step, freed)] == [forward - gradients, begin, end]
            chunked = replace(model, loss=7)
            assert [each.at(20) for each in moments(policy, step, chunked)] == [forward + 7, begin, end]


def test_casts_are_kept_by_blocks_that_do_not_recompute_themselves_and_do_not_grow():
    block = BlockBytes(kept=1000, attention=150, inputs=50, casts=70)
    step = StepBytes(tokens=10, blocks=(block,) * 8, outside=200, outside_casts=30)
    # Of eight blocks; or some of them, and one that is computed again. Then outside of them, and gradients of one.
    blocks = [8 * 70, 6 * 70 + 70, 4 * 70 + 70, *[70] * 4]
    assert [cast_bytes(policy, step) for policy in CANDIDATES] == [each + 30 + 70 for each in blocks]
    for policy in CANDIDATES:
        assert bytes_per_token(policy, step) == bytes_per_token(policy, STEP)
        assert step_bytes(policy, step, 20) == cast_bytes(policy, step) + 20 * bytes_per_token(policy, STEP)


def test_gradients_of_casts_are_those_of_a_block_or_of_what_is_outside():
    blocks = (None, BlockBytes(kept=1, attention=1, inputs=1, casts=20), BlockBytes(kept=1, attention=1, inputs=1))
    step = StepBytes(tokens=1, blocks=blocks, outside=0, outside_casts=30)
    assert cast_bytes("none", step) == 20 + 30 + 30
    assert cast_bytes("full", step) == 30 + 20 + 30
    assert cast_bytes("every_2", step) == 20 + 30 + 0 + 30  # the last one alone is computed again


TILES = BlockBytes(kept=1000, attention=150, inputs=50, wide=650, tile=90)
AT_HAND = StepBytes(tokens=10, blocks=(TILES,) * 8, outside=200).offering(tiles=[True] * 8, horizon=3)
NOTHING = ModelBytes(base=0, gradients=0, optimizer=0, gathered=0)


def test_in_tiles_a_block_that_is_computed_again_has_one_tile_of_what_is_wide():
    for policy in CANDIDATES[:5]:
        assert moments(policy, AT_HAND, NOTHING) == moments(policy, STEP, NOTHING)
    # Of 10 tokens: inputs, a block but for what is wide and with what tiles give twice, its gradients, the rest.
    # A tile and its gradients come with any length.
    assert bytes_per_token("full_tiled", AT_HAND) == (8 * 50 + 350 + 200 + 200) / 10
    assert tile_bytes("full_tiled", AT_HAND) == 135
    assert tile_bytes("full", AT_HAND) == 0
    assert step_bytes("full_tiled", AT_HAND, 30) == 135 + 3 * 1150
    forward, begin, end = moments("full_tiled", AT_HAND, replace(NOTHING, gradients=7))
    assert [forward.at(30), begin.at(30), end.at(30)] == [7 + 3 * 600, 135 + 3 * 1150, 7 + 135 + 3 * 600]


def test_where_inputs_leave_a_horizon_of_the_largest_is_in_memory():
    assert bytes_per_token("full_offloaded", AT_HAND) == (3 * 50 + 350 + 200 + 200) / 10
    blocks = (replace(TILES, inputs=70), TILES, None, replace(TILES, inputs=60))
    uneven = replace(AT_HAND, blocks=blocks, horizon=2)
    assert bytes_per_token("full_offloaded", uneven) == (70 + 60 + 350 + 210 + 200) / 10
    assert moments("full_offloaded", AT_HAND, NOTHING)[0].per_token == (3 * 50 + 200) / 10
    # Norms outside of blocks run in tiles with them.
    outside = replace(AT_HAND, outside_wide=80)
    assert bytes_per_token("full_tiled", outside) == bytes_per_token("full_tiled", AT_HAND) - 8
    assert moments("full", outside, NOTHING) == moments("full", AT_HAND, NOTHING)
    # Fewer blocks than that keep what they keep.
    few = replace(AT_HAND, horizon=9)
    assert bytes_per_token("full_offloaded", few) == bytes_per_token("full_tiled", few)


def test_what_is_not_at_hand_is_predicted_to_gain_nothing_and_is_never_taken():
    for tiles, horizon in ((False, 0), (False, 3), (True, 0)):
        step = AT_HAND.offering(tiles=[tiles] * 8, horizon=horizon)
        full, tiled, offloaded = (moments(policy, step, NOTHING) for policy in CANDIDATES[4:])
        assert (tiled == full) == (not tiles)
        assert (offloaded == tiled) == (not horizon)
        peaks = [peak_bytes(policy, step, NOTHING, 100) for policy in CANDIDATES]
        chosen = {cheapest_policy(CANDIDATES, peaks, budget) for budget in range(0, 100_000, 50)}
        assert ("full_tiled" in chosen, "full_offloaded" in chosen) == (tiles, bool(horizon))
    one = AT_HAND.offering(tiles=[False] * 7 + [True], horizon=0)
    assert bytes_per_token("full_tiled", one) == bytes_per_token("full", one)  # the largest of the others


@pytest.mark.parametrize(
    ("budget", "policy"),
    [
        (20_500, "full"), (20_499, "full_tiled"), (11_635, "full_tiled"), (11_634, "full_offloaded"), (9_135, "full_offloaded"), (9_134, None),
    ],
)  # fmt: skip
def test_behind_full_come_tiles_and_then_inputs_that_leave(budget, policy):
    assert (
        cheapest_policy(CANDIDATES, [peak_bytes(each, AT_HAND, NOTHING, 100) for each in CANDIDATES], budget) == policy
    )


def test_a_policy_of_auto_is_said_by_the_options_of_its_user():
    named = {policy: as_options(policy, tiles=True, tier="host") for policy in CANDIDATES}
    assert named["selective"] == {"activation_checkpointing": "selective"}
    assert named["full_tiled"] == {"activation_checkpointing": "full", "mlp_tile_tokens": "auto"}
    assert named["full_offloaded"] == {**named["full_tiled"], "activation_offload": "host"}
    assert "mlp_tile_tokens" not in as_options("full_offloaded", tiles=False, tier="host")
    for options in named.values():
        StrategyConfig(**options)


@pytest.mark.parametrize(
    ("budget", "policy"),
    [
        (10_000, "none"), (8_700, "none"), (8_699, "every_4"), (7_900, "every_4"), (7_899, "every_2"), (6_300, "every_2"), (6_299, "selective"),
        (3_100, "selective"), (3_099, "full"), (2_050, "full"), (2_049, None),
    ],
)  # fmt: skip
def test_the_cheapest_policy_that_fits_is_chosen(budget, policy):
    model = ModelBytes(base=0, gradients=0, optimizer=0, gathered=0)
    peaks = [peak_bytes(each, STEP, model, 10) for each in CANDIDATES]
    assert cheapest_policy(CANDIDATES, peaks, budget) == policy


def test_what_is_estimated_of_a_llama_is_more_than_was_measured():
    # dim 512, hidden 1408, float32: 42.6 KiB for each token and layer, docs/log/memory.md.
    width = 4 * 1024 + 3 * 1920
    step = estimated_step([width] * 8, 4096, 4, [(3 * 1408, 512)] * 8)
    assert 1.0 < step.blocks[0].kept / (42.6 * 1024) < 1.3
    # Its MLP leaves four of its hidden width: no more than that is taken off.
    assert 0.5 < step.blocks[0].wide / (4 * 1408 * 4) < 1.0
    assert step.blocks[0].tile == 512 * step.blocks[0].wide
    assert step.outside == 3 * 4096 * 4


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [dict(ulysses_size=2), dict(ring_size=2)], ids=["ulysses", "ring"])
def test_predicted_peaks_are_near_what_is_measured(degrees):
    config = LlamaConfig(vocab_size=4096, dim=512, num_layers=8, num_heads=8, num_kv_heads=8, hidden_dim=1408)
    with RankPool(2, timeout_s=600) as pool:
        for rank in pool.run(measure, degrees, 1024, 1, config):
            for policy, (predicted, peak, _) in rank.items():
                assert 0.9 < predicted / peak < 1.5, (policy, predicted / peak)


@pytest.mark.slow
def test_under_autocast_a_predicted_peak_is_no_less_than_what_is_measured():
    config = LlamaConfig(vocab_size=4096, dim=512, num_layers=8, num_heads=8, num_kv_heads=8, hidden_dim=1408)
    with RankPool(2, timeout_s=600) as pool:
        for rank in pool.run(measure, dict(ulysses_size=2), 1024, 1, config, "bf16-mixed"):
            for policy in ("none", "selective", "full"):
                predicted, peak, _ = rank[policy]
                assert 1 <= predicted / peak <= 1.5, (policy, predicted / peak)


def test_a_cpus_budget_is_a_share_of_the_machines_or_of_its_cgroup(tmp_path):
    cpu = torch.device("cpu")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert budget_bytes(cpu, 4, tmp_path) == int(0.9 * machine / 4)
    group = tmp_path / "sys/fs/cgroup"
    (group / "job/step").mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert budget_bytes(cpu, 4, tmp_path) == int(0.9 * machine / 4)
    (group / "memory.max").write_text(f"{2**30}\n")
    assert budget_bytes(cpu, 4, tmp_path) == int(0.9 * 2**30 / 4)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    (group / "job/step/memory.max").write_text(f"{2**29}\n")
    assert budget_bytes(cpu, 2, tmp_path) == int(0.9 * 2**29 / 2)


def test_what_is_in_use_grows_with_what_is_made():
    before = used_bytes(torch.device("cpu"))
    # Mapped anew: malloc would serve a tensor from what earlier tests freed, and that is resident already.
    with mmap.mmap(-1, 2**26) as made:
        made.write(bytes(2**26))
        assert used_bytes(torch.device("cpu")) - before > 2**25


def test_what_was_freed_is_not_in_use():
    cpu = torch.device("cpu")
    # Below glibc's size of a map of its own, and one behind them all: the heap does not shrink by itself.
    freed = [torch.ones(2**14) for _ in range(2**11)]
    behind = [torch.ones(2**14)]
    before = used_bytes(cpu)
    freed.clear()
    assert before - used_bytes(cpu) > 2**26
    assert behind[0].sum() == 2**14
