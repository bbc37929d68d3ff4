"""Compiled in the global view: the rules' cases and whole trainings, exact, of graphs that hold this rank's part."""

from __future__ import annotations

from functools import cache

import pytest
from torch import nn

from lightning_sp import SequenceParallelError
from lightning_sp.parallelize import compilation
from tests.global_view import compiled_ranks as ranks
from tests.global_view.cases.rule_cases import CASES
from tests.global_view.cases.user_cases import USER_CASES
from tests.global_view.training_ranks import one_process

LENGTH = 29  # padded to 30 or 32
# Sums, torch's attention, masks, writes, whole lines; with more, one of each kind: number by number, a table by position, products,
# attention written out.
FEW = ("masked mean", "attention to nothing", "shifted labels", "seen after writes")
MORE = (
    *FEW, "rope", "attention by hand",
    "learned positions", "max over the sequence", "attention pooling", "a mask that is added", "grouped attention of torch",
    "written in place", "first token", "stack", "causal convolution",
)  # fmt: skip
# torch 2.13's aot_eager and Inductor compute it wrong on one device, too: 102.5 for 10.3 of six rows whose labels end in -1.
TORCH_IS_WRONG = {"sum of losses of several labels"}
USERS = "a gradient reversed"  # by an autograd.Function
# What is one graph, of which nothing runs function by function.
ONE_GRAPH = {
    "learned positions",
    "rope",
    "masked mean",
    "max over the sequence",
    "attention by hand",
    "grouped attention of torch",
}


@pytest.mark.parametrize(
    ("ulysses", "ring", "length", "names"),
    [
        (1, 2, 16, FEW),
        pytest.param(2, 1, 13, MORE, marks=pytest.mark.slow),
        pytest.param(2, 2, 16, MORE, marks=pytest.mark.slow),
        pytest.param(
            1,
            2,
            16,
            sorted(CASES.keys() - USER_CASES - TORCH_IS_WRONG),
            marks=[pytest.mark.slow, pytest.mark.timeout(3600)],
        ),
        pytest.param(1, 2, 16, sorted(USER_CASES), marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_a_rule_is_exact_where_it_is_compiled(pools, ulysses, ring, length, names):
    step = 1 if set(names) <= set(USER_CASES) else 7  # some of these are long graphs
    for first in range(0, len(names), step):
        some = list(names[first : first + step])
        for answers in pools(ulysses * ring).run(ranks.rules, some, length, ulysses, ring):
            for name, (errors, graphs, breaks, notes) in zip(some, answers, strict=True):
                assert not isinstance(errors, str), (name, errors)
                assert max(errors["result"], errors["gradient"]) < 1e-10, (name, errors)
                if name in ONE_GRAPH and length == 16:
                    # Dynamo's of the user's functions, and that of this rank's.
                    assert (graphs, breaks, notes) == (2, 0, []), name


def test_a_token_that_is_written_to_is_not_compiled(pools):
    for [(errors, _, _, notes)] in pools(2).run(ranks.rules, ["tokens written in a list"], 16, 1, 2):
        assert max(errors["result"], errors["gradient"]) < 1e-10
        assert "a write to a token of the sequence: not compiled" in notes[0]


def test_a_users_own_backward_runs_between_two_graphs(pools):
    for [(errors, graphs, breaks, notes)] in pools(2).run(ranks.rules, [USERS], 16, 1, 2):
        assert max(errors["result"], errors["gradient"]) < 1e-10
        assert (graphs, breaks, notes) == (4, 1, [])


def test_what_a_compiler_fails_at_runs_as_it_is_with_one_line(pools):
    for errors, of_sequence, of_plain in pools(2).run(ranks.failing, "masked mean", 16, 1, 2):
        assert max(errors["result"], errors["gradient"]) < 1e-10
        assert of_sequence == ["RuntimeError: no code for it"]
        [line] = of_plain
        assert "torch.compile cannot take plain (" in line
        assert line.endswith("RuntimeError: no code for it")


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_second_length_is_not_compiled_again(pools, ulysses, ring):
    for answers in pools(2).run(ranks.lengths, [16, 24, 48, 32], ulysses, ring):
        assert max(error for error, _ in answers) < 1e-10
        assert [graphs for _, graphs in answers] == [2, 2, 2, 2]


@pytest.fixture(scope="module")
def expected(pools):
    """What one device gives, by loss."""

    @cache
    def of(loss):
        [found] = pools(1).run(one_process, loss, LENGTH)
        return found

    return of


QUICK = dict(preflight=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "options", "losses"),
    [
        (2, dict(ring_size=2, **QUICK), ["input_and_target", "mean_pooled"]),
        (2, dict(ulysses_size=2, activation_checkpointing="full"), ["input_and_target"]),
        (2, dict(ulysses_size=2, activation_checkpointing="matmuls", **QUICK), ["input_and_target"]),
        (2, dict(ulysses_size=2, activation_checkpointing="budget_25", **QUICK), ["input_and_target"]),
        (2, dict(ring_size=2, activation_checkpointing=True, **QUICK), ["shifted_logits"]),
        (4, dict(ulysses_size=2, ring_size=2), ["shifted_logits", "dpo"]),
    ],
)
def test_blocks_compiled_train_as_on_one_device(pools, expected, world, options, losses):
    for answers in pools(world).run(ranks.fits, losses, LENGTH, world, options):
        for loss, found in zip(losses, answers, strict=True):
            assert found["losses"] == pytest.approx(expected(loss)["losses"], rel=1e-10), loss
            for name, weight in expected(loss)["weights"].items():
                assert float((found["weights"][name] - weight).abs().max()) < 1e-9, (loss, name)
            assert found["graphs"] > 0, "nothing was compiled"
            assert (found["breaks"], found["notes"]) == ({}, []), loss


def test_an_older_torch_is_refused_by_its_version(monkeypatch):
    monkeypatch.setattr(compilation, "OLDEST", (99, 0))
    with pytest.raises(
        SequenceParallelError, match=r"compile=True with global_view=True on torch .*: needs torch 99\.0"
    ):
        compilation.compile_forwards([nn.Linear(1, 1)])
