"""The number by which the ranks of a sequence are known to hold the same batch tells apart what random augmentation makes of a sample."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch

from lightning_sp.data.batch.digest import digest

ROWS = torch.tensor([[2, 5, 2, 7], [5, 2, 7, 2]])
LONG = torch.arange(2**18, dtype=torch.float64) % 7919
X = torch.tensor([[0.5, -2.0], [1.5, 3.0]])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(X, -X, id="signs"),
        pytest.param(X, torch.where(torch.tensor([[True], [False]]), -X, X), id="the signs of a row"),
        pytest.param(ROWS, ROWS.flip(0), id="rows of one sum in another order"),
        pytest.param(torch.tensor([2, 5, 2]), torch.tensor([3, 3, 3]), id="numbers of one sum and one weighted sum"),
        pytest.param(torch.complex(X, X), torch.complex(X, -X), id="imaginary parts"),
        pytest.param(torch.complex(X, X), torch.complex(X, X).conj(), id="conjugates"),
        pytest.param(X.to_sparse(), (-X).to_sparse(), id="sparse values"),
        pytest.param(torch.eye(3).to_sparse(), torch.eye(3).flip(0).to_sparse(), id="sparse places"),
        pytest.param(X.numpy(), X.numpy()[::-1], id="arrays"),
        pytest.param(X.bool(), X > 1, id="booleans"),
        pytest.param(0.5, 0.25, id="a number of Python's"),
        pytest.param([3, 5], [3, 6], id="numbers of a list"),
        pytest.param(np.float64(0.5), np.float64(-0.5), id="a number of numpy's"),
        pytest.param(True, False, id="a flag"),
        pytest.param(LONG, LONG.roll(2**16), id="blocks of a long row"),
        pytest.param(LONG, LONG.index_fill(0, torch.tensor([150_000]), 1.0), id="one number behind the first block"),
    ],
)
def test_other_numbers_have_another_digest(one, other):
    first = {"input_ids": ROWS, "x": one}
    assert digest(first) == digest({"input_ids": ROWS.clone(), "x": deepcopy(one)})
    assert digest(first) != digest({"input_ids": ROWS, "x": other})


def test_what_is_no_number_is_not_compared():
    assert digest({"input_ids": ROWS, "name": "a", "of": np.array(["a"])}) == digest(
        {"input_ids": ROWS, "name": "b", "of": np.array(["b"])}
    )
