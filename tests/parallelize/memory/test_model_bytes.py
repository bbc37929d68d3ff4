"""What a model's weights, gradients and optimizer states take, by the sizes of its parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sp.parallelize.memory.model_bytes import model_bytes


@pytest.mark.parametrize(("kind", "states"), [(torch.optim.AdamW, 2), (torch.optim.SGD, 1), (torch.optim.ASGD, 2)])
def test_states_that_are_yet_to_come_are_those_of_the_optimizer(kind, states):
    """An optimizer that is not known is taken to have two; states that are there count in the memory that is used."""
    model = nn.Linear(8, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    before = model_bytes(model, [], [optimizer], torch.device("cpu"))
    assert before.optimizer == states * 4 * (8 * 4 + 4)
    optimizer.state[model.weight] = {"momentum": torch.zeros(4, 8)}
    assert model_bytes(model, [], [optimizer], torch.device("cpu")).optimizer == states * 4 * 4
