"""A call of the attention has one number, also when it is recomputed."""

from __future__ import annotations

import torch

from lightning_sp.context.dropout import DropoutCalls


def test_a_recomputed_call_has_its_forwards_number():
    calls = DropoutCalls()
    states, numbers = [], []
    for _ in range(3):
        states.append(torch.get_rng_state())
        numbers.append(calls.number())
    assert numbers == [0, 1, 2]
    for i in (2, 0, 1):
        torch.set_rng_state(states[i])
        assert calls.number() == i
