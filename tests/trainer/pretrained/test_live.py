"""A sharded model while it lives: its own gradient checkpointing, averages, saving, generating; what fails on one rank fails on all."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.trainer.pretrained import tuned_ranks as ranks
from tests.trainer.pretrained.pretrained_ranks import save_pretrained

RING, ULYSSES = dict(ring_size=2), dict(ulysses_size=2)
CASES = [
    dict(kind="checkpointing", strategy=RING),
    dict(kind="checkpointing, reentrant", strategy=ULYSSES, place="__init__"),
    dict(kind="average", strategy=RING, place="__init__"),
    dict(kind="average", strategy=ULYSSES),
    dict(kind="ema", strategy=RING),
    dict(kind="full, asked", strategy=RING),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("base"))
    save_pretrained(folder, False)
    return folder


@pytest.mark.slow
def test_what_is_done_with_a_sharded_model_is_as_on_one_device(pools, base):
    alone = pools(1).run(ranks.runs, [{**case, "strategy": None, "world": 1, "folder": base} for case in CASES])[0]
    for rank, answers in enumerate(pools(2).run(ranks.runs, [dict(world=2, folder=base, **case) for case in CASES])):
        for case, actual, expected in zip(CASES, answers, alone, strict=True):
            assert not expected["error"], (case, expected["error"])
            assert not actual["error"], (case, actual["error"])
            assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-10), case
            for name, weight in expected["weights"].items():
                assert max_error(actual["weights"][name], weight) < 1e-10, (case, name)
            told = rank == 0 and case["kind"].startswith("checkpointing")
            assert len(actual["told"]) == told, (case, actual["told"])
            assert not told or actual["told"][0].endswith("activation_checkpointing=selective")
            if case["kind"] == "full, asked":
                assert actual["asked"].tolist() == expected["asked"].tolist()
                assert actual["asked"].shape == (1, 13)


@pytest.mark.slow
def test_save_pretrained_by_two_lines_is_read_by_from_pretrained(pools, base, tmp_path):
    saved = str(tmp_path / "saved")
    case = dict(kind="full", folder=base, strategy=RING, world=2, saved=saved)
    for (answer,) in pools(2).run(ranks.runs, [case]):
        assert not answer["error"], answer["error"]
        assert answer["live"].startswith("SequenceParallelError: LlamaForCausalLM.save_pretrained: every rank"), answer
    loaded = ranks.plain(saved)
    assert {f"model.{name}" for name in loaded} == set(answer["weights"])
    for name, value in loaded.items():
        assert max_error(value.double(), answer["weights"][f"model.{name}"]) < 1e-6, name


def test_a_configure_model_that_fails_on_one_rank_ends_the_others(pools, base):
    case = dict(kind="fails on a rank", folder=base, strategy=RING, world=2)
    (other,), (failed,) = pools(2).run(ranks.runs, [case])
    assert failed["error"] == "ValueError: no such folder on this machine"
    assert "rank 1: configure_model failed: ValueError: no such folder on this machine" in other["error"]


@pytest.mark.slow
def test_another_trainer_goes_on_with_a_sharded_model(pools):
    (expected,) = pools(1).run(ranks.several_trainers, [None] * 3, 1)
    policies = ("none", "selective", "full")  # what blocks recompute may change
    strategies = [dict(sequence_parallel_size=2, activation_checkpointing=policy) for policy in policies]
    found = pools(2).run(ranks.several_trainers, strategies, 2)
    for actual in found:
        assert not actual["error"], actual["error"]
        assert len(actual["losses"]) == 4
        assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-10)
        assert actual["validated"] == pytest.approx(expected["validated"], abs=1e-10)
        assert "ulysses 2" in actual["mesh"], "the heads that were found once are known"
        for name, weight in expected["weights"].items():
            assert max_error(actual["weights"][name], weight) < 1e-10, name


def test_another_trainer_that_would_lay_the_model_out_otherwise_is_refused(pools):
    strategies = [dict(ring_size=2), dict(ring_size=2, shard_size=1, compile=True)]
    for answer in pools(2).run(ranks.several_trainers, strategies, 2):
        assert "shard_size=1, before 2; compile=True, before False" in answer["error"], answer
        assert "whole_state_dict" in answer["error"]
