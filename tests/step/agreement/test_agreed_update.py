"""Ranks step by the same learning rates, or not at all."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.step.agreement.agreed_update import hyperparameters
from tests.step.agreement import agreed_update_ranks as ranks

LAYOUT = dict(ulysses_size=2, preflight=False)


@pytest.mark.parametrize("where", ["on_train_batch_start", "training_step", "by hand"])
def test_a_learning_rate_of_one_rank_is_refused_before_the_update(pools, where):
    for answer in pools(2).run(ranks.fit, where, 2, LAYOUT):
        assert (
            "lr of optimizer 0, group 0 is 0.01 on rank 0; 0.002 on rank 1: must be the same on all" in answer["said"]
        ), answer
        assert answer["untouched"]
        assert answer["steps"] == 1


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("accumulation", "accumulate_grad_batches is 1 on rank 0; 4 on rank 1: must be the same on all"),
        ("clipping", "gradient_clip_val is None on rank 0; 0.5 on rank 1"),
        ("eval", "modules in eval mode (their count, and the sum of their numbers) is (0, 0) on rank 0; (17, "),
        ("dropout", "p of dropout modules (their sum, and that of each times its number) is (0.1, "),
    ],
)
def test_what_one_rank_changes_of_its_step_is_refused_before_the_update(pools, where, said):
    for answer in pools(2).run(ranks.fit, where, 2, LAYOUT):
        assert said in answer["said"], answer
        assert answer["untouched"]
        assert answer["steps"] == 1


def test_a_group_of_other_weights_is_refused_before_the_first_update(pools):
    for answer in pools(2).run(ranks.fit, "other weights", 2, LAYOUT):
        assert "weights of optimizer 0, group 0 is model." in answer["said"], answer
        assert answer["steps"] == 0


def test_the_order_of_weights_in_a_group_is_a_ranks_own(pools):
    for answer in pools(2).run(ranks.fit, "another order", 2, LAYOUT):
        assert (answer["said"], answer["steps"]) == ("", 2)


def test_one_of_all_ranks_is_followed(pools):
    for answer in pools(2).run(ranks.fit, "training_step", 2, LAYOUT, True):
        assert answer["said"] == ""
        assert answer["steps"] == 2


def test_what_an_optimizer_steps_by():
    weight = torch.nn.Parameter(torch.zeros(2))
    adam = torch.optim.AdamW([weight], lr=torch.tensor(0.5), betas=(0.9, 0.95), weight_decay=0.1)
    adam.param_groups[0]["note"] = ("attention", object())
    found = hyperparameters(
        [adam, torch.optim.SGD([{"params": [weight], "lr": 0.1, "nesterov": True, "momentum": 0.5}])]
    )
    assert found["lr of optimizer 0, group 0"] == 0.5
    assert found["betas of optimizer 0, group 0"] == (0.9, 0.95)
    assert found["weight_decay of optimizer 0, group 0"] == 0.1
    assert found["nesterov of optimizer 1, group 0"] is True
    assert not any("params" in name or "note" in name for name in found)
