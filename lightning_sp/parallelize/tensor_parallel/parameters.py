"""The parameters of a model with split layers, as DTensors: each rank has its part of those, and all of the others.

FSDP2 shards what it is given over its own axes, so each becomes one of both:

    colwise weight     (dp_shard: Shard(0) of the part, tensor_parallel: Shard(0))
    rowwise weight     (dp_shard: Shard(0),             tensor_parallel: Shard(1))
    a norm             (dp_shard: Shard(0),             tensor_parallel: Replicate)

Norms of gradients, optimizers, checkpoints and consolidated files then know the whole of each. What FSDP2 gathers is a plain tensor, this rank's
part: layers compute on plain tensors, and say what they send.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups


def split_parameters(root: nn.Module, axis: DeviceMesh, dims: Mapping[tuple[nn.Module, str], int]) -> None:
    """Put this rank's part, or the whole, of each parameter in its place, as a DTensor over the tensor-parallel axis.

    Args:
        root: the model, whose parameters are whole, or without memory.
        axis: of the mesh of parameters.
        dims: along which to split, by module and name.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    made[parameter] = _on_axis(parameter, axis, dims.get((module, name)))
                module._parameters[name] = made[parameter]


def _on_axis(parameter: nn.Parameter, axis: DeviceMesh, dim: int | None) -> nn.Parameter:
    data = parameter.detach()
    placement = Replicate() if dim is None else Shard(dim)
    if dim is not None:
        # A copy: a view would keep the whole.
        data = data.chunk(axis.size(), dim)[axis.get_local_rank()].clone(memory_format=torch.contiguous_format)
    made = DTensor.from_local(data, axis, [placement], run_check=False)
    split = nn.Parameter(made, requires_grad=parameter.requires_grad)
    vars(split).update(vars(parameter))  # what a user has noted on it
    return split


def gather_plain_parts(root: nn.Module) -> None:
    """Let FSDP2 gather each parameter of a sharded model as a plain tensor: this rank's part."""
    for each in parameter_groups(fsdp_modules(root)):
        for parameter in each.fsdp_params:
            # What FSDP2 makes a DTensor of what is whole by: torch 2.13 has both, those before the first.
            parameter.is_dtensor = False
            if hasattr(parameter, "_unsharded_dtensor_spec"):
                parameter._unsharded_dtensor_spec = None


def check_divides(name: str, parameter: Tensor, dim: int, size: int) -> None:
    """Refuse a weight that has no equal parts."""
    if parameter.shape[dim] % size:
        raise SequenceParallelError(
            f"{name} of shape {tuple(parameter.shape)} is to be split along dim {dim} by tensor_parallel_size={size}, which does not divide "
            f"{parameter.shape[dim]}; use one that does, or leave the layer out of tensor_parallel_plan"
        )
