"""Numbers, and NumPy's arrays of them, that are what they are, but for comparisons."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from lightning_sp.preflight.recording.numbers_read.tracked_arrays import TrackedArray, tracked_array
from lightning_sp.preflight.recording.numbers_read.tracked_numbers import Budget, Integer, made

COUNTS = np.array([3, 0, 5])

ASKED = {
    "above": lambda x: bool((x > 40).any()),
    "largest": lambda x: x.max() > 40,
    "sum": lambda x: np.sum(x) >= 40,
    "share": lambda x: x.max() / x.sum() > 0.9,
    "of a list": lambda x: x.tolist()[0] > 40,
    "item": lambda x: x[2].item() > 40,
    "first": lambda x: x[0] > 40,
    "below": lambda x: bool(np.less(40, x[0])),
    "each": lambda x: [each for each in x if each > 40] != [],
    "running": lambda x: x.cumsum()[-1] > 40,
    "mean": lambda x: x.mean() > 40,
}


@pytest.mark.parametrize("asked", ASKED)
def test_a_comparison_of_an_array_comes_out_as_if_its_numbers_were_large_or_small(asked):
    assert not ASKED[asked](COUNTS)
    for larger in (True, False):
        assert bool(ASKED[asked](tracked_array(COUNTS, Budget(99, larger=larger)))) is larger


def test_what_is_computed_of_an_array_is_what_it_is():
    counts = tracked_array(COUNTS.copy(), Budget(99, larger=True))
    x = torch.arange(8)
    ends = np.concatenate([[0], counts.cumsum()])
    assert [len(part) for part in x.split(counts.tolist())] == [3, 0, 5]
    assert len(x[int(ends[0]) : ends[1]]) == 3
    assert len(x[: counts[2]]) == 5
    assert [*range(counts[0])] == [0, 1, 2]
    assert torch.equal(torch.from_numpy(counts), torch.tensor(COUNTS))
    assert (counts == counts.max()).tolist() == [False, False, True]
    counts += 1
    assert isinstance(counts, TrackedArray)
    assert torch.equal(torch.tensor(counts), torch.tensor([4, 1, 6]))


def test_whether_an_expert_has_a_token_is_not_forced_to_no():
    few = tracked_array(COUNTS, Budget(99, larger=False))
    assert [n == 0 for n in few] == [False, True, False]
    assert [bool(n) for n in few] == [True, False, True]


@pytest.mark.parametrize("larger", [True, False])
def test_a_fraction_of_a_tracked_number_is_compared_as_that(larger):
    assert (Fraction(made(Integer, 4, Budget(99, larger=larger)), 8) > Fraction(1, 2)) is larger
