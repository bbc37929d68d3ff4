"""The tensors that a model's functions hold are found and replaced."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.closures import closure_tensors, learned_score_mod, rebuild

TABLE = torch.randn(7)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.unread = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(5))

    def by_name(self, index: int) -> torch.Tensor:
        return self.weight[index]

    def forward(self, index: int) -> torch.Tensor:
        return self.weight[index] + TABLE[index]


def _by_default(index: int, held: torch.Tensor = TABLE) -> torch.Tensor:
    return held[index]


def _enclosing(held: torch.Tensor, how: str):
    if how == "nested":

        def inner(index: int) -> torch.Tensor:
            return held[index]

        return lambda index: inner(index)
    if how == "elements":
        parts = {"a": [held]}
        return lambda index: parts["a"][0][index]
    if how == "itself":

        def countdown(index: int) -> torch.Tensor:
            return held[0] if index == 0 else countdown(index - 1)

        return countdown
    return lambda index: held[index]


@pytest.mark.parametrize("how", ["direct", "nested", "elements", "itself"])
def test_tensors_of_enclosing_functions_are_found_and_replaced(how):
    held, other = torch.randn(3), torch.full((3,), 5.0)
    function = _enclosing(held, how)
    assert [id(t) for t in closure_tensors(function).values()] == [id(held)]
    assert float(rebuild(function, {id(held): other})(2)) == 5.0
    assert float(function(2)) == float(held[0] if how == "itself" else held[2]), "the user's own is as it was"


def test_tensors_of_modules_defaults_partials_and_globals_are_found_and_what_is_not_read_is_not():
    module, other = Holder(), torch.full((7,), 5.0)
    assert [t is module.weight for t in closure_tensors(module.by_name).values()] == [True]
    assert {id(t) for t in closure_tensors(lambda i: module(i)).values()} <= {id(module.weight), id(TABLE)}
    assert float(rebuild(module.by_name, {id(module.weight): other})(1)) == 5.0
    for function in (_by_default, partial(_by_default, held=TABLE), lambda i: TABLE[i]):
        assert next(iter(closure_tensors(function).values())) is TABLE
        assert float(rebuild(function, {id(TABLE): other})(1)) == 5.0
        assert float(function(1)) == float(TABLE[1])


def test_a_score_function_learns_by_what_it_holds_or_is_refused():
    table, gate = nn.Parameter(torch.randn(2, 8)), nn.Linear(1, 1)
    like = torch.zeros(1, 2, 4, 3)
    made = learned_score_mod(lambda s, b, h, i, j: s + table[h, i - j], like)
    assert [t is table for t in made.tensors] == [True]
    with pytest.raises(SequenceParallelError, match=r"none of those found in it, \[\(1, 1\)\]"):
        learned_score_mod(lambda s, b, h, i, j: s * gate.weight[0, 0] + gate(s.reshape(1)).sum(), like)
