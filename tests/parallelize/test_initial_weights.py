"""What is taken of a model before it is sharded."""

from __future__ import annotations

import torch
from torch import nn

from lightning_sp.parallelize import whole_state


def test_whole_state_keeps_the_memory_that_was_there_and_not_the_parameters():
    """FSDP2 moves a parameter by `.data`: what referred to it would hold the whole model on the device."""
    module = nn.BatchNorm1d(3)
    weight, held = module.weight.data, whole_state(module)
    module.weight.data = torch.zeros(3)
    assert set(held) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert held["weight"].data_ptr() == weight.data_ptr()
    assert torch.equal(held["weight"], torch.ones(3))
