"""The table of rules: its page, and that every name in it is one of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lightning_sp.global_view.rules.attention.scores import RULES as OF_SCORES
from lightning_sp.global_view.table import TABLE
from tools import rules_table

# Of Python's iteration and copies, and the shared form of `Tensor.view` in torch's own code.
OTHERS = {"iter", "deepcopy", "unsafe_view"}


def is_of_torch(name):
    places = (torch, torch.Tensor, F, torch.linalg, torch.special, torch.fft, torch._C._nn, torch.ops.aten)
    forms = (name, name.removeprefix("fft_"), f"{name}_", f"_{name}", f"__{name}__", f"linalg_{name}")
    return any(hasattr(place, form) for place in places for form in forms)


def test_the_page_is_what_the_tool_writes():
    assert rules_table.TARGET.read_text() == rules_table.page(), "python -m tools.rules_table writes it again"


def test_every_name_is_a_function_of_torch():
    assert [name for name in {*TABLE, *OF_SCORES} - OTHERS if not is_of_torch(name)] == []
