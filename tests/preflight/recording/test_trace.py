"""The calls of a step in short: what has numbers, and what has none."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from lightning_sp.preflight.recording.trace import Trace, traced


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own, of each module that it traces
def test_what_a_linearized_function_is_traced_with_has_no_numbers_to_compare():
    module = nn.Linear(3, 3, dtype=torch.float64)
    x, tangent = torch.randn(2, 2, 4, 3, dtype=torch.float64)
    _, expected = torch.func.jvp(module, (x,), (tangent,))

    trace = Trace(rows=2, tokens=4)
    with traced(module, trace):
        _, along = torch.func.linearize(module, x)
        found = along(tangent)

    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    summaries = [each for event in trace.events.values() for each in (*event.inputs, *event.outputs)]
    assert summaries
    assert not any(is_fake(each.values) for each in summaries)
