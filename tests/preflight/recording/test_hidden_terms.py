"""Terms of a loss that count for nothing while a step is tried are compared where they would count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_sp.preflight.recording.hidden_terms import HiddenTerms, common_terms
from tests.preflight.recording import hidden_terms_ranks as ranks

X = torch.tensor([1.0, -2.0], requires_grad=True)
ZERO = 0.0

# What hides X, and what it gives where that is shown.
CALLS = {
    "number": (lambda: X.sum() * ZERO, lambda: X.sum()),
    "number first": (lambda: ZERO * X, lambda: X),
    "integer": (lambda: X * int(ZERO), lambda: X),
    "no tokens": (lambda: X * torch.zeros(1), lambda: X),
    "in place": (lambda: (X * 1.0).mul_(torch.zeros(())), lambda: X),
    "vector": (lambda: X * torch.tensor([2.0, 0.0]), lambda: X * torch.tensor([2.0, 1.0])),
    "dot": (lambda: torch.dot(torch.tensor([0.0, 2.0]), X), lambda: X[0] + 2 * X[1]),
    "product": (lambda: X @ torch.tensor([0.0, 0.0]), lambda: X.sum()),
    "alpha": (lambda: torch.add(torch.ones(2), X, alpha=ZERO), lambda: X + 1),
    "value": (lambda: torch.addcmul(torch.ones(2), X, X, value=ZERO), lambda: X * X + 1),
    "lerp": (lambda: torch.lerp(torch.ones(2), X, ZERO), lambda: (X + 1) / 2),
    "lerp of a tensor": (lambda: torch.lerp(X, torch.ones(2), torch.ones(())), lambda: (X + 1) / 2),
    "where": (lambda: torch.where(torch.tensor(True), torch.ones(2), X), lambda: 1 + X / 2),
    "clamp": (lambda: X.clamp(min=5.0), lambda: X),
    "clamp between": (lambda: torch.clamp(X, 5.0, 6.0), lambda: X),
    "clamp_max": (lambda: X.clamp_max(-5.0), lambda: X),
    "relu": (lambda: F.relu(X - 2.0), lambda: X - 2),
    "relu6": (lambda: F.relu6(X + 9.0), lambda: X + 9),
    "maximum": (lambda: torch.maximum(X, torch.full((2,), 5.0)), lambda: X + 5),
    "smaller": (lambda: torch.min(torch.full((2,), -5.0), X), lambda: X - 5),
    "small": (lambda: X.sum() * 1e-3, lambda: X.sum()),
    "difference": (lambda: X - X.detach(), lambda: 0.1 * X.detach().sin()),
    "difference from": (lambda: torch.sub(X.data, X), lambda: 0.1 * X.detach().sin()),
    "subtracted times": (lambda: torch.sub(torch.ones(2), X, alpha=ZERO), lambda: 1 - X),
    "quotient": (lambda: X / X.detach(), lambda: 1 + 0.1 * X.detach().sin()),
}  # fmt: skip
OPEN = {
    "a number": lambda: X * 2,
    "a weight of a tensor": lambda: X * 1e-3,
    "no gradient": lambda: X.detach() * ZERO,
    "a gradient that is not wanted": lambda: _without_gradient(),
    "always": lambda: X.sum() * 0.0 + 0 * X.sum(),
    "a mask": lambda: torch.where(torch.tensor([True, True]), torch.ones(2), X),
    "the branch that is chosen": lambda: torch.where(torch.tensor(True), X, torch.ones(2)),
    "some slope": lambda: X.clamp(min=0.5),
    "both": lambda: torch.maximum(X, torch.zeros(2)),
    "a difference": lambda: X - 2 * X.detach(),
    "nothing from nothing": lambda: (X - X) - torch.zeros(2),
    "the mean": lambda: X - X.detach().mean(),
}


def _without_gradient() -> torch.Tensor:
    with torch.no_grad():
        return X * ZERO


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_hides_is_found_and_shown(name):
    hiding, shown = CALLS[name]
    with HiddenTerms({}) as terms:
        closed = hiding()
    with HiddenTerms({}, follows=True) as on_shards:
        hiding()
    assert torch.equal(closed, hiding())
    assert len(terms.found) == 1
    assert terms.found.items() <= on_shards.found.items()
    with HiddenTerms(terms.found) as again:
        assert torch.equal(hiding(), shown())
    assert again.found == {}
    (call,) = terms.found
    assert call.describe().startswith("test_hidden_terms.py:")


@pytest.mark.parametrize("name", OPEN)
def test_a_call_that_hides_nothing_is_not_found(name):
    with HiddenTerms({}) as terms:
        OPEN[name]()
    assert terms.found == {}


def test_calls_of_one_line_are_told_apart():
    with HiddenTerms({}) as terms:
        for weight in (1.0, 0.0, 1.0):
            X * weight
    (call,) = terms.found
    assert call.number == 1


def test_what_only_some_runs_hide_is_not_shown():
    with HiddenTerms({}) as terms:
        small, none = X.sum() * 1e-3, X.sum() * ZERO
        small + none
    found = terms.found
    first, second = found
    assert common_terms([found, found], exact=False) == found
    assert [*common_terms([found, found], exact=True)] == [second]
    assert [*common_terms([found, {first: found[first]}], exact=False)] == [first]
    assert common_terms([found, {first: (0.0,)}], exact=False) == {}


VARIANTS = ("buffer", "relu", "small", "vector", "alpha", "lerp", "where", "clamp", "maximum")


@pytest.mark.parametrize(
    "kind",
    ["number", *(pytest.param(each, marks=pytest.mark.slow) for each in VARIANTS)],
)
def test_a_hidden_term_that_looks_along_the_sequence_is_refused_before_the_first_step(pools, kind):
    precision = "32-true" if kind == "small" else "64-true"
    for found in pools(2).run(ranks.fit, kind, precision):
        assert "with what hidden_terms_ranks.py:" in found["error"], found["error"]
        assert "if it never will, leave it out" in found["error"]


def test_a_gate_that_is_zero_among_others_hides_no_slope(pools):
    for found in pools(2).run(ranks.fit, "slope"):
        assert "with small numbers in gates, which begin at zero," in found["error"]


def test_a_teacher_that_is_the_student_at_first_hides_no_distance(pools):
    for found in pools(2).run(ranks.fit, "teacher"):
        assert "and in teacher.embedding.weight" in found["error"]
        assert "which are copies of trained ones," in found["error"]
    for found in pools(2).run(ranks.fit, "teacher", "64-true", "auto"):
        assert found == {"error": "", "whole": True}


def test_a_policy_gradient_whose_value_is_always_the_same_hides_no_tokens(pools):
    for found in pools(2).run(ranks.fit, "policy"):
        assert "with what hidden_terms_ranks.py:" in found["error"], found["error"]
        assert "has another loss on ranks that share a sequence" in found["error"]
    for found in pools(2).run(ranks.fit, "policy", "64-true", "auto"):
        assert found == {"error": "", "whole": True}


@pytest.mark.parametrize("kind", ["exact", "never"])
def test_a_term_that_is_exact_or_never_counts_is_trained(pools, kind):
    for found in pools(2).run(ranks.fit, kind):
        assert found == {"error": "", "whole": False}


@pytest.mark.slow
def test_a_hidden_term_is_carried_in_the_global_view(pools):
    for found in pools(2).run(ranks.fit, "number", "64-true", "auto"):
        assert found == {"error": "", "whole": True}
