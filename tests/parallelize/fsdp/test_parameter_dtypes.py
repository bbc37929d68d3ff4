"""A module that casts its own parameters in its forward is refused by name, on the first forward and on every rank."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.parameter_dtypes import refuse_changed_dtypes


class Router(nn.Module):
    """As of Switch Transformers: its classifier is float32, whatever the model is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.classifier, self.dtype = nn.Linear(4, 2), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier.to(self.dtype)(x.to(self.dtype)).to(x)


def forward(dtype: torch.dtype) -> str:
    model = nn.Sequential(nn.Linear(4, 4), Router(dtype)).double()
    fully_shard(model[1], mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    refuse_changed_dtypes(model)
    try:
        for _ in range(2):
            model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
    except SequenceParallelError as error:
        return str(error)
    return ""


def test_a_parameter_that_its_module_casts_is_refused(pools):
    for said in pools(2).run(forward, torch.float32):
        assert (
            "1.classifier.weight is torch.float64, and the model makes it torch.float32 in its forward (2 such in 1)"
            in said
        )
        assert "precision='32-true'" in said
        assert "config.router_dtype" in said


def test_one_of_the_same_dtype_is_not(pools):
    assert pools(2).run(forward, torch.float64) == ["", ""]
