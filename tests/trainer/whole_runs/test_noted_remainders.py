"""Remainders are noted, with what they are compared with."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from lightning_sp.trainer.noted_remainders import NotedTensors, Remainder, all_wanted, noted_number


def noting(value):
    taken = []
    return noted_number(value, lambda *each: taken.append(each)), taken


@pytest.mark.parametrize(
    ("use", "taken"),
    [
        (lambda n: n % 6, {(12, 6, None)}),
        (lambda n: (n + 2 - 1) % 6, {(13, 6, None)}),
        (lambda n: divmod(3 + n, 6)[1], {(15, 6, None)}),
        (lambda n: n & 7, {(12, 8, None)}),
        (lambda n: n & 6, set()),
        (lambda n: n % 1, set()),
        (lambda n: n % 2.5, set()),
        (lambda n: n * 2 % 6, set()),
        (lambda n: n % 6 == 3, {(12, 6, None), (12, 6, 3), (12, 6, 2)}),
        (lambda n: n % 6 != 0, {(12, 6, None), (12, 6, 0), (12, 6, 5)}),
        (lambda n: not n % 6, {(12, 6, None), (12, 6, 0), (12, 6, 5)}),
        (lambda n: n % 6 < 2, {(12, 6, None), (12, 6, 2), (12, 6, 1)}),
        (lambda n: n % 6 >= 2, {(12, 6, None), (12, 6, 2), (12, 6, 1)}),
        (lambda n: n % 6 > 2, {(12, 6, None), (12, 6, 2), (12, 6, 3)}),
        (lambda n: n % 6 in (1, 4), {(12, 6, None), (12, 6, 1), (12, 6, 0), (12, 6, 4), (12, 6, 3)}),
        (lambda n: n % 6 == 7, {(12, 6, None)}),
        (lambda n: [10, 11, 12, 13, 14, 15][n % 6], {(12, 6, None)}),
    ],
)
def test_what_is_taken_of_a_number_is_noted_and_is_what_it_was(use, taken):
    number, found = noting(12)
    noted = use(number)
    assert set(found) == taken
    assert noted == use(12)


def test_copied_and_saved_they_are_plain_numbers():
    number, _ = noting(12)
    for each in (number, number % 5, number + 1):
        assert type(copy.deepcopy(each)) is type(pickle.loads(pickle.dumps(each))) is int
    assert {number % 5: "a"}[2] == "a"
    assert torch.arange(12)[number % 5] == 2


@pytest.mark.parametrize(
    ("use", "taken"),
    [
        (lambda t: t % 6, {(12, 6, None)}),
        (lambda t: torch.remainder(t + 1, 6), {(13, 6, None)}),
        (lambda t: t % 6 == 3, {(12, 6, None), (12, 6, 3), (12, 6, 2)}),
        (lambda t: (t % 6).ge(2), {(12, 6, None), (12, 6, 2), (12, 6, 1)}),
        (lambda t: t.item() % 6 == 3, {(12, 6, None), (12, 6, 3), (12, 6, 2)}),
        (lambda t: (t + 1).item() % 6, set()),
        (lambda t: t.repeat(2) % 6, set()),
        (lambda t: t % 6.5, set()),
    ],
)
def test_what_is_taken_of_a_tensor_of_one_number_is_noted(use, taken):
    counted, found = torch.tensor(12), []
    with NotedTensors(lambda *each: found.append(each), [counted]):
        noted = use(counted)
    assert torch.equal(torch.as_tensor(noted), torch.as_tensor(use(counted)))
    assert set(found) == taken


def test_what_is_asked_of_a_remainder_is_wanted_and_else_its_ends():
    taken = Remainder("batches", 1, 6)
    assert all_wanted([taken]) == [taken._replace(wanted=0), taken._replace(wanted=5)]
    assert all_wanted([taken, taken._replace(wanted=3)]) == [taken._replace(wanted=3)]


@pytest.mark.parametrize(
    ("offset", "divisor", "each", "wanted", "ahead"),
    [
        (1, 6, 1, 3, 2),
        (1, 6, 1, 1, 6),
        (1, 6, 2, 3, 1),
        (1, 6, 2, 2, None),
        (0, 10**9, 1, 5, 5),
        (0, 10**9, 1, 10**8, None),
    ],
)
def test_how_far_ahead_a_remainder_is_wanted(offset, divisor, each, wanted, ahead):
    assert Remainder("batches", offset, divisor, each, wanted).ahead(0) == ahead
