"""Weights that note how they are read, where something is compiled."""

from __future__ import annotations

from torch import nn

from lightning_sp.config import StrategyConfig
from lightning_sp.step.prepare import with_gathers
from tests.instruments.told import told


def test_compiled_code_gathers_float32_and_a_line_says_so():
    module, config = nn.Sequential(nn.Linear(2, 2)), StrategyConfig(gather_dtype="auto")
    with told() as lines:
        assert with_gathers(module, config) is config
        assert lines == []
        module[0].compile(backend="eager")
        assert with_gathers(module, config).gather_dtype == "float32"
    assert len(lines) == 1
    assert "gather_dtype='auto' gathers float32 here" in lines[0]
