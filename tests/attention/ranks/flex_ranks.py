"""What each rank runs in test_flex_kernel.py; returns plain values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import flex_attention as flex

from lightning_sp.attention.kernels import select, torch_flex
from tests.attention.ranks.attention_ranks import law_case


def flex_law(cases: list[dict[str, Any]]) -> tuple[list[Any], int]:
    """Return the law's cases by FlexAttention, which torch computes densely here, and how often it was called."""
    torch.compiler.reset()  # of what other tests compiled in these ranks: there is a most for one function
    compiled, num_calls = torch.compile(flex.flex_attention, backend="eager", dynamic=True, fullgraph=True), 0

    def counted() -> Any:
        nonlocal num_calls
        num_calls += 1
        return compiled

    with (
        mock.patch.object(flex, "_validate_device", lambda *_: None),  # noqa: PT008 (Dynamo traces it)
        mock.patch.object(torch_flex, "compiled", counted),
        mock.patch.object(torch_flex, "_warn_once", _refuse),
        mock.patch.object(
            select, "kernel_for", return_value=(SimpleNamespace(name="none"), torch_flex.TorchFlexKernel)
        ),
        mock.patch.object(select, "is_right", return_value=True),
    ):
        return [law_case([case]) for case in cases], num_calls


def _refuse(text: str) -> None:
    raise AssertionError(text)
