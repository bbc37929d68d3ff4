"""`activation_checkpointing="auto"`: the cheapest policy that a budget allows, chosen by all ranks before the first step and each longer one."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

from lightning_sp.testing import RankPool, assert_sharded_equals_unsharded
from tests.step import auto_checkpointing_ranks as ranks
from tests.trainer.tiny import VOCAB

NONE, SELECTIVE, EVERY_2 = ["none"] * 8, ["selective"] * 8, ["selective", "none"] * 4
LAYOUT = dict(ulysses_size=2)


@pytest.fixture(scope="module")
def answers():
    """Of each rank: within any budget; of a longer second batch; of the same policies by name; of a budget that nothing fits."""
    off = dict(**LAYOUT, preflight=False)
    cases = [
        # What is imported and loaded by a first fit is resident then.
        dict(lengths=[256, 256], strategy=LAYOUT),
        dict(lengths=[256, 256], strategy=dict(**off, memory_budget_gib=1000.0)),
        dict(lengths=[512, 2048], strategy=LAYOUT, machine_mib=110),
        dict(lengths=[512, 2048], strategy=dict(**off, activation_checkpointing="none")),
        dict(lengths=[256], strategy=dict(**LAYOUT, memory_budget_gib=0.01)),
        dict(lengths=[256], strategy=dict(**off, memory_budget_gib=0.01)),
    ]
    # Processes of its own: memory that tests before have freed is resident, and comes and goes between two looks.
    with RankPool(2) as pool:
        return pool.run(ranks.all_budgeted, [dict(world=2, **case) for case in cases])


@pytest.mark.slow
def test_a_step_that_fits_keeps_all_and_says_nothing(answers):
    for rank in answers:
        assert rank[0]["of_blocks"] == [NONE, NONE]
        # Without a preflight the first step is what is measured.
        assert rank[1]["of_blocks"] == [["measured"] * 8, NONE]
        assert rank[0]["told"] == rank[1]["told"] == []


def test_a_longer_batch_recomputes_and_a_line_says_so(answers):
    for number, (_, _, auto, plain, *_) in enumerate(answers):
        first, longer = auto["of_blocks"]
        # The cheapest that fits beside what the tests before have left in the process.
        assert first == NONE, auto["told"]
        assert longer in (SELECTIVE, EVERY_2), auto["told"]
        assert plain["of_blocks"] == [NONE] * 2
        assert auto["losses"] == plain["losses"]
        for ours, theirs in zip(auto["grads"], plain["grads"], strict=True):
            assert all(torch.equal(ours[name], grad) for name, grad in theirs.items())
        assert len(auto["told"]) == (number == 0), auto["told"]
        if number == 0:
            policy = "selective" if longer == SELECTIVE else "every_2"
            assert f"activation_checkpointing={policy} from this step on: 1,024 tokens of a rank" in auto["told"][0]


@pytest.mark.slow
def test_where_full_does_not_fit_mlps_run_in_tiles_and_then_inputs_leave(pools, tmp_path):
    """What runs is what no checkpoint gives, and inputs that leave change no bit. Never stays never."""
    common = dict(world=2, lengths=[64, 1024], build=ranks.TILED, precision="64-true")
    off = dict(**LAYOUT, preflight=False)
    files = dict(offload_folder=str(tmp_path), activation_loading_horizon=1)
    cases = [
        dict(**common, strategy=dict(**off, activation_checkpointing="none")),
        dict(**common, strategy=off, between=("full", "full_tiled")),
        dict(**common, strategy=dict(**off, **files), between=("full_tiled", "full_offloaded")),
        dict(**common, strategy=dict(**off, mlp_tile_tokens=None), between=("full", "full_tiled")),
    ]
    for number, (plain, tiled, leaving, never) in enumerate(pools(2).run(ranks.all_budgeted, cases)):
        assert tiled["policies"] == ["auto", "full_tiled"], tiled["told"]
        assert leaving["policies"] == ["auto", "full_offloaded"], leaving["told"]
        assert never["policies"] == ["auto", "full"], never["told"]
        for ours, theirs in zip(tiled["grads"], plain["grads"], strict=True):
            assert_sharded_equals_unsharded([*ours.values()], [*theirs.values()], [*theirs])
        assert leaving["losses"] == tiled["losses"]
        for ours, theirs in zip(leaving["grads"], tiled["grads"], strict=True):
            assert all(torch.equal(ours[name], grad) for name, grad in theirs.items())
        if number == 0:
            said = "sequence_parallel: activation_checkpointing=full, mlp_tile_tokens=auto"
            assert f"{said} from this step on: 512 tokens of a rank" in tiled["told"][0]
            assert f"{said}, activation_offload=disk from this step on" in leaving["told"][0]


@pytest.mark.slow
def test_compiled_blocks_keep_what_is_dearest_of_what_fits(pools):
    common = dict(world=2, lengths=[256], build=ranks.TILED, precision="64-true", backend="aot_eager", first=1)
    off = dict(**LAYOUT, preflight=False)
    cases = [
        dict(**common, strategy=dict(**off, activation_checkpointing="none")),
        dict(**common, strategy=dict(**off, compile=True), between=("none", "budget_75")),
        dict(**common, strategy=dict(**off, compile=True), between=("budget_50", "budget_25")),
        dict(**common, strategy=dict(**off, compile=True), between=("budget_25", "selective")),
    ]
    for number, (plain, *compiled) in enumerate(pools(2).run(ranks.all_budgeted, cases)):
        for found, policy in zip(compiled, ("budget_75", "budget_25", "selective"), strict=True):
            assert found["of_blocks"] == [[policy] * 3], found["told"]
            for ours, theirs in zip(found["grads"], plain["grads"], strict=True):
                assert_sharded_equals_unsharded([*ours.values()], [*theirs.values()], [*theirs])
            if number == 0:
                assert f"activation_checkpointing={policy} from this step on: 128 tokens of a rank" in found["told"][0]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_what_is_estimated_of_a_block_is_a_little_more_than_is_measured(pools, precision):
    # Where nothing is measured: on one device, without a preflight, in compiled code.
    fitted = dict(world=2, lengths=[256], strategy=dict(**LAYOUT, preflight=False), precision=precision)
    for rank in pools(2).run(partial(ranks.budgeted, build=ranks.USUAL, **fitted)):
        assert all(1.0 <= ratio <= 1.5 for ratio in rank["estimated"]), rank["estimated"]
        # So it is without what MLPs and norms leave, which is taken off. What norms have in float32 in half precision shapes do not tell.
        most = 4.0 if precision == "bf16-true" else 2.5
        assert all(1.0 <= ratio <= most for ratio in rank["estimated_tiled"]), rank["estimated_tiled"]


def test_what_a_crop_leaves_is_what_a_step_leaves_for_each_token(answers):
    for rank in answers:
        (crop, of_crop), (step, of_step) = rank[0]["measured"], rank[1]["measured"]
        assert crop <= step == 128
        assert of_crop == pytest.approx(of_step, rel=0.03)
        none, *_, selective, full, tiled, _ = of_step
        assert none > selective > full > tiled
        # Eight blocks and half of one for its gradients.
        assert none == pytest.approx(8.5 * 16.6 * 1024, rel=0.15)


@pytest.mark.slow
def test_under_autocast_a_crop_leaves_what_a_step_does_and_casts_of_weights_once(pools):
    common = dict(world=2, precision="bf16-mixed", lengths=[256])
    cases = [
        dict(**common, strategy=dict(**LAYOUT, preflight_tokens=64)),
        dict(**common, strategy=dict(**LAYOUT, preflight=False, memory_budget_gib=1000.0)),
        dict(**common, strategy=dict(**LAYOUT, preflight=False, memory_budget_gib=1000.0, gather_dtype="auto")),
    ]
    of_block = 2 * (4 * 64 * 64 + 3 * 64 * 1024)
    for crop, *steps in pools(2).run(ranks.all_budgeted, cases):
        assert crop["measured"][0] == 32
        for step in steps:
            assert step["measured"][0] == 128
            assert crop["measured"][1] == pytest.approx(step["measured"][1], rel=0.03)
        for each in (crop, *steps):
            none, every_4, every_2, selective, full, *_ = each["casts"]
            assert selective == full < 3 * of_block
            assert [none - selective, every_4 - selective, every_2 - selective] == [
                7 * of_block,
                6 * of_block,
                4 * of_block,
            ]


def test_a_given_budget_that_nothing_fits_is_refused_on_all_ranks_alike(answers):
    messages = {rank[4]["error"].partition(" (memory_budget_gib")[0] for rank in answers}
    assert len(messages) == 1
    (message,) = messages
    found = re.fullmatch(
        r"128 tokens of a rank are predicted to need (.*) GiB at least, with activation_checkpointing='\w+'(?:, mlp_tile_tokens='auto')?, "
        r"of a budget of (.*)",
        message,
    )
    assert found
    assert float(found[1]) > float(found[2]) > 0
    fit = re.search(r"in which (\d+) fit", answers[0][4]["error"])
    assert fit
    assert int(fit[1]) < 128
    assert "sequence_parallel_size" in answers[0][4]["error"]


def test_what_is_only_estimated_refuses_no_budget(answers):
    for number, rank in enumerate(answers):
        estimated = rank[5]
        assert estimated["error"] == ""
        assert len(estimated["losses"]) == 1
        said = [line for line in estimated["told"] if "estimated by the shapes of parameters alone" in line]
        assert len(said) == (number == 0)


def test_an_estimate_has_no_logits_where_the_loss_makes_them_in_chunks(answers):
    for rank in answers:
        assert rank[5]["estimated_outside"] == (3 * 4 * VOCAB, 0)
        assert rank[5]["deferring"] == [True]  # in the run, where it is asked


@pytest.mark.slow
def test_a_step_that_cannot_be_measured_trains_as_without(pools):
    build = partial(ranks.small, ranks.OwnDerivative)
    common = dict(world=2, lengths=[32, 32], build=build)
    cases = [
        {**common, "strategy": {**LAYOUT, "preflight": preflight, "activation_checkpointing": policy}}
        for preflight in (True, False)
        for policy in ("auto", "none")
    ]
    for with_auto, without, unchecked_auto, unchecked in pools(2).run(ranks.all_budgeted, cases):
        for auto, none in ((with_auto, without), (unchecked_auto, unchecked)):
            assert auto["error"] == none["error"] == ""
            assert auto["measured"] is None
            assert auto["losses"][-2:] == none["losses"][-2:]
            for ours, theirs in zip(auto["grads"], none["grads"], strict=True):
                assert all(torch.equal(ours[name], grad) for name, grad in theirs.items())
