"""Optimizers that cannot step shards step whole weights, as on one device; the others step shards."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict

import pytest
import torch

from lightning_sp.testing import max_error
from lightning_sp.trainer.optimizers.optimizer_trial import ELEMENTWISE, Verdict
from lightning_sp.trainer.optimizers.state_of_weights import StatesOfShards
from tests.trainer.optimizers import optimizer_ranks as ranks
from tests.trainer.optimizers import toggle_ranks

WHOLE = ["Adafactor", "hugging face", "Rprop", "LBFGS", "norm of shards"]
LAYOUTS = [(2, dict(ring_size=2, preflight=False)), (4, dict(data_parallel_size=2, ulysses_size=2, shard_size=2))]
# Of four ranks one that says why it steps whole weights, and one that a trial finds out.
OF_FOUR = ["Adafactor", "norm of shards"]
OPTIONS = dict(gradient_clip_val=0.5)
# All weights are whole behind the forward.
STAYS_WHOLE = dict(ulysses_size=2, preflight=False, reshard_after_forward=False)


@pytest.fixture(scope="module")
def alone(pools):
    found = pools(1).run(ranks.fits, [dict(name=name, **(OPTIONS if name != "LBFGS" else {})) for name in WHOLE])[0]
    return dict(zip(WHOLE, found, strict=True))


def same(answer, expected, name):
    for parameter, weight in expected["weights"].items():
        assert max_error(answer["weights"][parameter], weight) < 1e-10, (name, parameter)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [pytest.param(*LAYOUTS[0], id="2"), pytest.param(*LAYOUTS[1], id="4", marks=pytest.mark.slow)],
)
def test_a_fit_is_one_devices(pools, alone, world, strategy):
    names = WHOLE if world == 2 else OF_FOUR
    cases = [dict(name=n, world=world, strategy=strategy, **(OPTIONS if n != "LBFGS" else {})) for n in names]
    for rank, answers in enumerate(pools(world).run(ranks.fits, cases)):
        for name, answer in zip(names, answers, strict=True):
            same(answer, alone[name], name)
            assert answer["sharded"], name
            assert not answer["warned"], name
            # Rprop writes by an index, and LBFGS to views, which reach shards in a run.
            assert len(answer["said"]) == (rank == 0 and name not in ("Rprop", "LBFGS")), (name, answer["said"])


def test_the_reason_is_said(pools):
    said = pools(2).run(ranks.fit, "norm of shards", 2, LAYOUTS[0][1])[0]["said"]
    assert said[0].startswith(
        "NormOfShards cannot step sharded weights (it moves a weight of shape (4, 3) otherwise than the whole one)"
    )
    assert "each of its steps gathers" in said[0]


@pytest.mark.slow
def test_by_hand_and_resumed(pools, tmp_path):
    (one,) = pools(1).run(ranks.fits, [dict(name="Adafactor", manual=True, max_epochs=2)])[0]
    common = dict(name="Adafactor", manual=True, world=2, strategy=LAYOUTS[0][1])
    path = str(tmp_path / "half")
    pools(2).run(ranks.fits, [dict(**common, save=path)])
    for (answer,) in pools(2).run(ranks.fits, [dict(**common, resume=path, max_epochs=2)]):
        same(answer, one, "resumed")


def test_a_step_finds_the_states_of_the_weights_that_it_sees(pools, tmp_path):
    common = dict(name="AdamW", reads_states=True)
    [alone, plain] = pools(1).run(ranks.fits, [dict(**common, max_epochs=2), dict(name="AdamW", max_epochs=2)])[0]
    # Most of a state is that of the first steps, and resumed it is loaded anew.
    assert max(max_error(alone["weights"][name], weight) for name, weight in plain["weights"].items()) > 1e-6
    sharded = dict(**common, world=2, strategy=LAYOUTS[0][1])
    path = str(tmp_path / "half")
    pools(2).run(ranks.fits, [dict(**sharded, save=path)])
    cases = [
        dict(**sharded, max_epochs=2),
        dict(**sharded, resume=path, max_epochs=2),
        dict(**common, world=2, strategy=STAYS_WHOLE, max_epochs=2),
    ]
    for answers in pools(2).run(ranks.fits, cases):
        for answer in answers:
            same(answer, alone, "states")


@pytest.mark.slow
def test_which_optimizers_step_shards(pools):
    elementwise = sorted(each.__name__ for each in ELEMENTWISE)
    for *found, of_shards, wrapper in pools(2).run(ranks.verdicts, [*elementwise, "norm of shards", "wrapper"]):
        assert found == [Verdict()] * len(elementwise), dict(zip(elementwise, found, strict=True))
        assert of_shards.fails
        assert not wrapper.fails
        assert "missing 1 required positional argument: 'kind'" in wrapper.untried, (
            "a copy would move the inner optimizer's weights"
        )


def test_one_that_cannot_be_tried_is_said_to_be_so(pools):
    for rank, answer in enumerate(pools(2).run(ranks.fit, "wrapper", 2, LAYOUTS[0][1])):
        assert len(answer["said"]) == (rank == 0)
        assert all("Wrapper could not be tried on small weights (TypeError: " in each for each in answer["said"])


@pytest.mark.parametrize("name", toggle_ranks.MODULES)
def test_layers_learn_where_one_device_has_them_learn(pools, name):
    [expected] = pools(1).run(toggle_ranks.trained, name, 1)
    for found in pools(2).run(toggle_ranks.trained, name, 2):
        for name, weight in expected.items():
            assert float((found[name] - weight).abs().max()) < 1e-12, name


def test_states_are_written_and_taken_out_by_the_weights_that_a_step_sees(pools):
    [(losses, weights, number)] = pools(1).run(ranks.rewritten, 1, None)
    for found_losses, found, found_number in pools(2).run(ranks.rewritten, 2, STAYS_WHOLE):
        assert found_losses == pytest.approx(losses, rel=1e-12)
        assert found_number == number
        for name, weight in weights.items():
            assert max_error(found[name], weight) < 1e-10, name


def test_the_dictionary_of_states_is_copied_and_joined_as_any_other():
    key, own = torch.ones(1), defaultdict(dict)
    states = StatesOfShards(own, torch.nn.Linear(1, 1))
    states[key] = {"step": 1}
    assert own[key] == {"step": 1}, "others may have it, too"
    for made in (states.copy(), copy.copy(states), states | {}, {} | states, copy.deepcopy(states)):
        assert list(made.values()) == [{"step": 1}]
    kept = pickle.loads(pickle.dumps(states))
    assert type(kept) is defaultdict
    assert kept.default_factory is dict
    assert states[torch.ones(2)] == {}
    assert len(states) == len(own) == 2
