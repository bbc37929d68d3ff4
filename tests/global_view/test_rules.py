"""The table of rules: each function on shards, forward and backward, against the whole tensor on one device."""

from __future__ import annotations

import pytest

from tests.global_view import rule_ranks as ranks
from tests.global_view.cases.rule_cases import CASES
from tests.global_view.cases.user_cases import USER_CASES

NAMES = sorted(CASES)
# Ulysses, ring, tokens; 13 are padded.
LAYOUTS = [
    (2, 1, 13),
    (1, 2, 16),
    pytest.param(1, 2, 13, marks=pytest.mark.slow),
    pytest.param(2, 2, 13, marks=pytest.mark.slow),
]
# What one device's own result is whole on every rank: one number for each token at most, or a reduction.
WHOLE = (
    "sum", "mean", "max", "min", "norm of", "norm", "var", "std", "logsumexp over", "logsumexp", "argmax", "first", "last",
    "gathered", "a class token in attention", "masked", "attention pooling", "gram", "tokens mixed", "cumsum", "flip of",
    "sorted", "shifted labels", "smooth", "kl", "z-loss", "keepdims", "amin", "topk of tokens", "rows", "var by", "first places",
    "statistics", "added up", "adaptive pools", "aligned with labels",
    "histograms",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch flash")
@pytest.mark.parametrize(("ulysses", "ring", "length"), LAYOUTS)
def test_a_rule_is_exact_forward_and_backward(pools, ulysses, ring, length):
    for answers in pools(ulysses * ring).run(ranks.in_global_view, NAMES, length, ulysses, ring):
        refused = {name: found for name, found in zip(NAMES, answers, strict=True) if isinstance(found, str)}
        assert not refused
        wrong = {
            name: found
            for name, found in zip(NAMES, answers, strict=True)
            if max(found["result"], found["gradient"]) > 1e-10
        }
        assert not wrong


@pytest.mark.slow
def test_what_needs_no_whole_stays_split(pools):
    [answers, _] = pools(2).run(ranks.in_global_view, NAMES, 16, 1, 2)
    split = {name for name, found in zip(NAMES, answers, strict=True) if found["split"]}
    assert {name for name in NAMES if not name.startswith(WHOLE) and name not in USER_CASES} <= split


def test_frames_of_a_strided_convolution_take_the_room_of_frames(pools):
    assert pools(2).run(ranks.frames_held, 8) == [[4, 2, 4]] * 2


@pytest.mark.parametrize("is_packed", [False, True])
def test_some_tokens_take_the_room_of_some(pools, is_packed):
    """A loss over chunks by hand takes the time of the whole for each chunk else."""
    assert pools(2).run(ranks.slices_held, is_packed) == [[4, 4, 4, 4, 2, 32]] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another view of memory", ["as_strided of (2, 16, 8) with the sequence in dim 1", "rule_ranks.py", "x.as_strided(", "unshard(x)"]),
        ("a derivative by a transform", ["torch.func was handed a tensor of the sequence", "rule_ranks.py", "unshard(x)"]),
        ("tokens within a transform", ["of a tensor of the sequence and one inside of torch.vmap or torch.func", "jacrev"]),
        ("learned numbers by position", ["torch.vmap calls with all of them reads (2, 16, 8)", "rule_ranks.py", "unshard(x)"]),
        ("scores that are too many", ["square on the scores", "up to 268435456 numbers on a rank: here 536870912"]),
        ("a maximum with what hides all keys", ["numbers that hide all keys of a query, and a maximum with them"]),
        ("a bias that hides all keys", ["numbers that are added, and hide all keys of a query"]),
        ("written into windows", ["mul in place into windows of the sequence, which are a copy here"]),
        ("written by out= of another shape", ["sum with out= of another shape of (2, 16, 8)"]),
        ("a backward hook", ["a backward hook of a module", "this rank's part"]),
        ("many weights at once", ["matmul of a tensor of the sequence and one inside of torch.vmap", "rule_ranks.py"]),
        ("sent", ["torch.distributed.all_reduce of a tensor of the sequence", "data_parallel_group"]),
        ("below autograd", ["exp", "was reached with a tensor of the sequence", "its gradient would be lost"]),
        ("many rows at once", ["torch.vmap or torch.func was handed a tensor of the sequence", "row.mean(0)"]),
        ("exchanged in place", ["transpose in place of (2, 16, 8)"]),
        ("hooked", ["register_hook of a tensor of the sequence", "the gradient of this rank's part"]),
        ("written by an own function", ["InPlace, an autograd.Function", "InPlace.apply(x * 1)", "writes into a tensor that it is given"]),
        ("a kernel of an own function", ["data_ptr of a tensor of the sequence", "x.data_ptr(), x", "a kernel of your own"]),
        ("a gradient that is normed", ["Users, an autograd.Function", "a gradient that is larger by a factor does not give it more by that"]),
        ("a gradient that is clipped", ["a gradient that is larger by a factor does not give it more by that factor"]),
        ("for so many tokens alone", ["it fails by the rules of what it calls (ZeroDivisionError: division by zero)"]),
        ("neighbours added in place", ["add in place reads some of the tokens that it writes", "y[:, 1:].add_(y[:, :-1])", ".clone()"]),
        ("the first token subtracted in place", ["sub in place reads some of the tokens that it writes"]),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_what_has_no_rule_is_refused_with_the_users_line(pools, name, words):
    for [message] in pools(2).run(ranks.refused, [name]):
        for word in ["global_view: ", *words]:
            assert word in message


def test_declared_documents_are_attended_to_whole_alone(pools):
    """A slice does not say which documents its tokens are of."""
    names = ["the first tokens", "the last tokens", "few queries", "few keys", "whole"]
    for *slices, whole in pools(2).run(ranks.refused, [f"packed documents, {name}" for name in names]):
        assert whole == "not refused"
        for message, tokens in zip(slices, (12, 12, 4, 4), strict=True):
            assert f"scaled_dot_product_attention of {tokens} tokens, the batch's sequence has 16" in message
            assert "packed_documents=False and the mask" in message
