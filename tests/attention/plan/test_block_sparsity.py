"""The map of what an arbitrary mask leaves visible, block by block."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.attention.plan.block_sparsity import SIDE, block_size, search
from lightning_sp.attention.plan.blocks import Plan
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.attention.spec.score_mod import MaskMod
from lightning_sp.attention.spec.scores import Scores
from lightning_sp.layout import SequenceLayout


def _scattered(row, head, query, key):
    """A few keys of a few queries alone, others in each head and row."""
    return ((query * 7 + key * 13 + head * 5 + row) % 1021 == 0) & (key <= query)


MASKS = {
    "window": lambda row, head, query, key: (query - key).abs() <= 3,
    "nothing": lambda row, head, query, key: (query < 0) & (key < 0),
    "everything": lambda row, head, query, key: (query >= 0) & (key >= 0),
    "one key": lambda row, head, query, key: (key == 11) & (query >= 12) & (head == 1),
    "the last": lambda row, head, query, key: (query >= 63) & (query % 64 == 63) & (key < 2),
    "scattered": _scattered,
}


@pytest.mark.parametrize("length", [32, 128, 640, 2048])
@pytest.mark.parametrize("name", MASKS)
def test_a_map_has_each_block_in_which_something_is_visible_and_no_other(name, length):
    plan = Plan(AttentionMask(causal=False), SequenceLayout(), length, 2)
    like = torch.empty(2, 3, length, 4)
    found = search(Scores(mask_mod=MaskMod(MASKS[name])), plan, 0, (0, 3), like, (None, None))
    positions = torch.arange(length)
    visible = torch.zeros(length, length, dtype=torch.bool)
    for row in range(2):
        for head in range(3):
            visible |= MASKS[name](torch.tensor(row), torch.tensor(head), positions[:, None], positions[None])
    size = block_size(length)
    expected = torch.zeros(SIDE, SIDE, dtype=torch.uint8)
    seen = visible.nonzero() // size
    expected[seen[:, 0], seen[:, 1]] = 1
    assert torch.equal(found, expected)
