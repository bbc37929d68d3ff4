"""What is added to the counts that divide a loss, by what groups and one device divide by."""

from __future__ import annotations

import pytest

from lightning_sp.loss.added_constants import added_constants, counts_with_constants

WAY, OTHER = ("DivBackward0",), ("AddBackward0", "DivBackward0")


@pytest.mark.parametrize(
    ("groups", "whole", "added"),
    [
        ([[(WAY, (5.0,))], [(WAY, (9.0,))]], [(WAY, (13.0,))], {WAY: [(0, 1.0)]}),
        ([[(WAY, (2.0, 5.0))], [(WAY, (2.0, 5.0))], [(WAY, (2.0, 3.0))]], [(WAY, (2.0, 12.0))], {WAY: [(1, 0.5)]}),
        # A cross entropy of all groups is a term of one device alone.
        ([[(WAY, (5.0,))], [(WAY, (9.0,))]], [(OTHER, ()), (WAY, (13.0,))], {WAY: [(0, 1.0)]}),
        ([[(WAY, (5.0,))], [(WAY, (9.0,))]], [(WAY, (14.0,))], None),
        ([[(WAY, (5.0,))], [(WAY, (9.0,))]], [(OTHER, (13.0,))], None),
        ([[(WAY, (5.0,))], [(OTHER, (9.0,))]], [(WAY, (13.0,))], None),
        ([[(WAY, (5.0,))], [(WAY, (9.0,))]], [(WAY, (13.0,)), (WAY, (1.0,))], None),
        ([[(WAY, (5.0, 4.0))], [(WAY, (9.0, 2.0))]], [(WAY, (13.0, 6.0))], None),
        ([[(WAY, (float("inf"),))], [(WAY, (9.0,))]], [(WAY, (13.0,))], None),
    ],
)
def test_what_is_added_once_and_by_each_group(groups, whole, added):
    assert added_constants(groups, whole) == added
    if added:
        assert counts_with_constants(groups[0], added) == [groups[0][0][1][added[WAY][0][0]]]
