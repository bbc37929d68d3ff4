"""What a budget allows: pure functions of numbers; and where a budget comes from."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace

import pytest
import torch

from benchmarks.memory.checkpointing import measure
from lightning_sp.models import LlamaConfig
from lightning_sp.parallelize.memory.memory_budget import budget_bytes, used_bytes
from lightning_sp.parallelize.memory.memory_prediction import (
    CANDIDATES,
    BlockBytes,
    ModelBytes,
    StepBytes,
    bytes_per_token,
    cast_bytes,
    cheapest_policy,
    estimated_step,
    moments,
    of_each_block,
    peak_bytes,
    step_bytes,
)
from lightning_sp.testing import RankPool

BLOCK = BlockBytes(kept=1000, attention=150, inputs=50)
STEP = StepBytes(tokens=10, blocks=(BLOCK,) * 8, outside=200)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("none", "nnnnnnnn"), ("every_4", "snnnsnnn"), ("every_2", "snsnsnsn"), ("every_3", "snnsnnsn"), ("selective", "ssssssss"),
        ("full", "ffffffff"), ("every_9", "snnnnnnn"),
    ],
)  # fmt: skip
def test_a_policy_says_how_each_block_recomputes_itself(policy, expected):
    assert "".join(how[0] for how in of_each_block(policy, 8)) == expected


def test_a_token_adds_what_blocks_keep_one_that_is_computed_again_its_gradients_and_the_rest():
    # Of 10 tokens: eight blocks; or some of them by 200 each, and one of 1000 at a time; or by their inputs. Then gradients of 500, and 200.
    blocks = [8000, 2 * 200 + 6000 + 800, 4 * 200 + 4000 + 800, 8 * 200 + 800, 8 * 50 + 950]
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


def test_casts_are_kept_by_blocks_that_do_not_recompute_themselves_and_do_not_grow():
    block = BlockBytes(kept=1000, attention=150, inputs=50, casts=70)
    step = StepBytes(tokens=10, blocks=(block,) * 8, outside=200, outside_casts=30)
    # Of eight blocks; or some of them, and one that is computed again. Then outside of them, and gradients of one.
    blocks = [8 * 70, 6 * 70 + 70, 4 * 70 + 70, 70, 70]
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
    assert cheapest_policy(peaks, budget) == policy


def test_what_is_estimated_of_a_llama_is_more_than_was_measured():
    # dim 512, hidden 1408, float32: 42.6 KiB for each token and layer, docs/log/memory.md.
    width = 4 * 1024 + 3 * 1920
    step = estimated_step([width] * 8, 4096, 4)
    assert 1.0 < step.blocks[0].kept / (42.6 * 1024) < 1.3
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
