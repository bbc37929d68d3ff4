"""Options that ranks were given apart are refused before the run: they would wait for each other, or train apart without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_sp import comm
from tests.trainer.whole_runs import same_options_ranks as ranks


def test_other_options_on_one_rank_are_refused_on_all(pools: Any, tmp_path: Path):
    first, second = pools(2).run(ranks.refused, str(tmp_path))
    assert first == second
    clip, steps, strategy, saves, alone, timer, same, version, numbers, manual = first
    assert clip.startswith(
        "ranks were given other options: gradient_clip_val is 0.1 on rank 0; 0.2 on rank 1: ranks would"
    )
    assert "max_steps is 4 on rank 0; 5 on rank 1; accumulate_grad_batches is 1 on rank 0; 2 on rank 1" in steps
    assert "preflight of the strategy is True on rank 0; False on rank 1" in strategy
    assert "every_n_train_steps of ModelCheckpoint 0 is 2 on rank 0; 3 on rank 1" in saves
    assert "monitor of ModelCheckpoint 0 is None on rank 0; not given on rank 1" in alone
    assert "ModelCheckpoint 0 is 'ModelCheckpoint' on rank 0; not given on rank 1" in alone
    assert alone.count("; ") < 8  # three of eight
    assert "and 5 others" in alone
    assert "Timer 0 is 'Timer' on rank 0; not given on rank 1; duration of Timer 0 is 60.0 on rank 0" in timer
    assert "automatic_optimization of the LightningModule is True on rank 0; False on rank 1" in manual
    assert "the version of torch is '2.0' on rank 0; " in version
    assert "torch.are_deterministic_algorithms_enabled() is True on rank 0; False on rank 1" in numbers
    assert same == "trained"


def test_who_has_which_is_listed():
    of_ranks = [{"a": "1", "b": 2}, {"a": "1", "b": 3}, {"a": "1"}, {"a": "1", "b": 2}]
    assert comm.told_differences(of_ranks) == "b is 2 on rank 0, 3; 3 on rank 1; not given on rank 2"
    assert comm.told_differences(of_ranks[:1] * 2) == ""


def test_a_checkpoint_that_one_rank_resumes_and_another_does_not_see_is_named(pools: Any, tmp_path: Path):
    first, second = pools(2).run(ranks.resumed, str(tmp_path))
    assert first == second
    assert first[0].startswith(f"ckpt_path is {tmp_path}/x.ckpt on rank 0; None on rank 1: some ranks would resume")
    assert first[1].startswith(f"ckpt_path is None on rank 0; {tmp_path}/x.ckpt on rank 1: some ranks would resume")
    assert first[2] == "resumed at step 2"
