"""The heads of attention that a rank has where tensor parallelism has split them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sp.config import StrategyConfig
from lightning_sp.step import rank_heads


@pytest.mark.parametrize(("split", "expected"), [(True, (4, 2)), (False, (8, 4))])
def test_each_rank_has_its_part_of_both_kinds_of_heads(monkeypatch, split, expected):
    asked = {
        "_query_heads": lambda *_: 8, "named_kv_heads": lambda _: 4, "parameter_layout": lambda _: None, "check_split": lambda *_: split,
    }  # fmt: skip
    for name, answer in asked.items():
        monkeypatch.setattr(rank_heads, name, answer)
    config = StrategyConfig(tensor_parallel_size=2)
    assert rank_heads.heads_of_rank(nn.Linear(1, 1), config, 1, torch.device("cpu")) == expected
