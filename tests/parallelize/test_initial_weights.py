"""What is taken of a model before it is sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sp import SequenceParallelError
from lightning_sp.parallelize import materialize_meta, whole_state


def test_whole_state_keeps_the_memory_that_was_there_and_not_the_parameters():
    """FSDP2 moves a parameter by `.data`: what referred to it would hold the whole model on the device."""
    module = nn.BatchNorm1d(3)
    weight, held = module.weight.data, whole_state(module)
    module.weight.data = torch.zeros(3)
    assert set(held) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert held["weight"].data_ptr() == weight.data_ptr()
    assert torch.equal(held["weight"], torch.ones(3))


def test_what_is_built_on_meta_is_initialised_and_refused_where_nothing_says_how():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Scaled())
    here = nn.Linear(2, 2)
    before = here.weight.detach().clone()
    model.append(here)
    with pytest.raises(
        SequenceParallelError, match=r"2 \(Scaled\) was built on the meta device and has no reset_parameters"
    ):
        materialize_meta(model, torch.device("cpu"))
    Scaled.reset_parameters = lambda self: nn.init.ones_(self.factor)  # type: ignore[attr-defined]
    torch.manual_seed(1)
    materialize_meta(model, torch.device("cpu"))
    assert not any(p.is_meta for p in model.parameters())
    assert model[0].weight.std() > 0.1
    assert torch.equal(model[2].factor, torch.ones(3))
    assert torch.equal(here.weight, before), "what was there stays"
