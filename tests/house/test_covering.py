"""The rows that `make test` takes of a product have every pair of it."""

from __future__ import annotations

import itertools

from tests.drawn_cases.covering import covering


def test_every_pair_that_occurs_is_chosen_and_few_rows_are():
    rows = [
        dict(zip("abcd", values, strict=True)) for values in itertools.product(range(4), range(3), range(3), range(2))
    ]
    rows = [row for row in rows if (row["a"], row["b"]) != (1, 1)]  # two that never meet
    chosen = [rows[i] for i in covering(rows)]
    for one, other in itertools.combinations("abcd", 2):
        assert {(row[one], row[other]) for row in chosen} == {(row[one], row[other]) for row in rows}
    assert 11 <= len(chosen) <= 16 < len(rows) == 66
    assert covering(rows) == covering(rows)


def test_an_axis_may_be_absent():
    rows = [{"a": 0}, {"a": 0, "b": 1}, {"b": 1, "c": 2}]
    assert covering(rows) == [1, 2]
