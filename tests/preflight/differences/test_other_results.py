"""A step that decides by its loss, or the last one, by a metric, or by a weight, is tried both ways before the first step."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from math import exp, hypot
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sp.preflight.recording.kept_results import Result, noting_results, results_shown
from lightning_sp.preflight.recording.numbers_read.tracked_numbers import of_results
from lightning_sp.preflight.recording.unheard import prints_held
from tests.preflight.differences import other_results_ranks as ranks
from tests.slow import slow


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("loss", torch.tensor(9.0))
        self.last, self.steps, self.state, self.lately = 9.0, 0, {"mean": 1.5}, deque([0.25], maxlen=2)
        self.of_numpy, self.history = np.float64(9.0), torch.ones(3)

    def step(self) -> None:
        self.last, self.steps, self.first = 2.5, self.steps + 1, 0.5
        self.loss.fill_(1.25)
        self.state["mean"] *= 0.5
        self.lately.append(0.75)
        self.of_numpy = np.float64(1.75)
        self.history[0] = 0.5


def test_numbers_that_a_step_leaves_and_that_are_no_counts_are_noted():
    model, found = Model(), list[Result]()
    noting_results(model.step, SimpleNamespace(lightning_module=model, callbacks=[]), found)()
    values = {each.name: each.value for each in found}
    assert values == {
        "last": 2.5, "first": 0.5, "loss": 1.25, "mean": 0.75, None: [0.25, 0.75], "of_numpy": 1.75, "history": [0.5, 1, 1],
    }  # fmt: skip


@pytest.mark.parametrize("larger", [False, True])
def test_they_are_what_they_are_but_where_they_are_compared(larger):
    model, found = Model(), list[Result]()
    noting_results(model.step, SimpleNamespace(lightning_module=model, callbacks=[]), found)()
    del model.first
    with results_shown(model, found, set(), of_results(larger=larger)):
        assert [each > 1 for each in (model.last, model.first, model.state["mean"], model.lately[-1])] == [larger] * 4
        assert [bool(model.loss > 1), bool(2 * model.loss > 1), model.loss.item() > 1] == [larger] * 3
        assert [model.last < 100, model.loss < 100, not model.loss > 100] == [not larger] * 3
        assert (float(model.loss) > 100) == larger
        means = [np.mean([*model.lately]), np.array(model.lately).mean(), statistics.mean(model.lately)]
        assert [each > 1 for each in (*means, model.of_numpy, model.history[:2].mean())] == [larger] * 5
        computed = (math.exp(model.last), np.log(model.last), round(100 * model.last), 100 * model.last // 1)
        assert [each > 50 for each in computed] == [larger] * 4
        by_name = (exp(model.last), int(100 * model.last), hypot(1.0, model.last))
        assert [each > 50 for each in by_name] == [larger] * 3
        assert (int(100 * model.last) > 10**9) == larger
        assert (np.mean([0.5, 2.5]), math.exp(0.0), np.sqrt(4.0), model.first.__int__()) == (
            1.5,
            1.0,
            2.0,
            500 * larger,
        )
        assert [model.last > 0, model.last != 0, bool(model.last)] == [larger] * 3
        assert float(model.last * torch.ones(())) == 2.5
        assert float(torch.tensor(2 * model.first)) == 1.0
    assert (type(model.last), hasattr(model, "first"), model.state) == (float, False, {"mean": 0.75})
    assert (float(model.loss), list(model.lately), type(model.of_numpy)) == (1.25, [0.25, 0.75], np.float64)
    assert np.mean([*model.lately]) == 0.5


@pytest.mark.parametrize("kind", ["attribute", "metric", "weight", "text", "own", "computed", *slow("tensor", "list")])
def test_what_begins_at_a_lower_loss_is_refused_before_the_first_step(pools, kind):
    for found in pools(2).run(ranks.fit, kind):
        # Of a list nothing is read before there are two, and the metric is not computed in the first step.
        assert ("as at optimizer step 2 in epoch 0" in found["error"]) == (kind in ("list", "computed"))
        assert "as if small, gives another result on shards than whole" in found["error"]
        assert found["steps"] == 0
        assert found["kept"] == (9.0, 1.0, False)


@pytest.mark.parametrize(
    ("kind", "when"), [("hook", "with norm"), ("tensors", "with norm, what other_results_ranks.py:")]
)
def test_what_a_hook_leaves_or_a_step_comes_to_later_is_tried_both_ways_before_the_fourth_step(pools, kind, when):
    for found in pools(2).run(ranks.fit, kind):
        assert f"after 3 optimizer steps {when}" in found["error"]
        assert "as if small, gives another result on shards than whole" in found["error"]
        assert found["steps"] == 3


def test_what_a_step_does_with_a_number_that_it_never_had_neither_ends_nor_writes_nor_says_anything(pools, tmp_path):
    for steps, files, printed in pools(2).run(ranks.guarded, str(tmp_path)):
        assert (steps, files, printed) == (2, [], "step 0\nstep 1\nbehind\n")


@pytest.mark.parametrize("kind", ["rounds", "weight"])
def test_a_loop_by_a_number_that_a_trial_shows_ends_soon_and_at_the_same_round_in_each_run(pools, kind):
    for steps, forwards in pools(2).run(ranks.search, kind):
        assert steps == 2
        assert forwards < 150


def failing_trial():
    with prints_held() as begin:
        for number in range(2):
            begin()
            print("run", number, sep=" ", end=".\n")
        print("to standard error", file=sys.stderr)
        raise ValueError("of the step")


def test_what_the_last_run_of_a_trial_has_printed_is_let_out_where_it_fails(capsys):
    with pytest.raises(ValueError, match="of the step"):
        failing_trial()
    print("behind")
    assert capsys.readouterr() == ("run 1.\nbehind\n", "to standard error\n")


def test_a_later_step_that_reads_a_number_of_its_tokens_is_refused_before_the_first(pools):
    """On the crop nothing comes of it."""
    for found in pools(2).run(ranks.fit, "tokens"):
        assert "training_step decides by a number of its tokens" in found["error"]
        assert "as at optimizer step 2 in epoch 0 (length=2)" in found["error"]
        assert found["steps"] == 0


@pytest.mark.slow
def test_a_step_that_computes_with_them_is_not_compared_again(pools):
    for found in pools(2).run(ranks.fit, "none"):
        assert (found["error"], found["steps"], found["type"]) == ("", 4, True)
