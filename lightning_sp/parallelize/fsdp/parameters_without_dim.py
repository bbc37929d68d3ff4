"""Parameters that are a single number, of shape (): a temperature, the weight of a term. FSDP2 splits along the first dim, and they have none.

Their shards are of shape (1,), which one rank holds, and so are their gradients and what an optimizer keeps of them. A step sees them
with shape (), and so does whoever reads what a checkpoint or `whole_state_dict` makes of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups
from lightning_sp.weights.single_numbers import mark_single_number, note_single_number

Place = tuple[nn.Module, str]


def give_first_dim(root: nn.Module) -> list[Place]:
    """Give each parameter without a dim one, in place, before FSDP2 has it; return where they are."""
    found: list[Place] = []
    longer: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dim():
                continue
            if id(parameter) not in longer:
                made = nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad)
                vars(made).update(vars(parameter))
                longer[id(parameter)] = made
            module._parameters[name] = longer[id(parameter)]
            note_single_number(module, name)
            found.append((module, name))
    return found


def show_without_dim(root: nn.Module, places: list[Place]) -> None:
    """Let a sharded module's steps see the parameters of `give_first_dim` with shape ()."""
    wanted = {(id(module), name) for module, name in places}
    for group in parameter_groups(fsdp_modules(root)) if wanted else ():
        for each in group.fsdp_params:
            if (id(each._module_info.module), each._module_info.param_name) in wanted:
                shard = vars(each).pop("sharded_param")
                each.__class__ = _SingleNumber
                each._orig_size, each._contiguous_orig_stride = torch.Size(()), ()
                each.sharded_param = shard


class _SingleNumber(FSDPParam):
    """A parameter of FSDP2's whose shards have a dim more than the whole that steps see. FSDP2 may take another object for its shard."""

    @property
    def sharded_param(self) -> nn.Parameter:
        """The shard, marked as one of a single number."""
        found: nn.Parameter = vars(self)["sharded_param"]
        mark_single_number(found)
        return found

    @sharded_param.setter
    def sharded_param(self, shard: nn.Parameter) -> None:
        vars(self)["sharded_param"] = shard

    def _get_grad_inner_tensor(self, grad: Tensor) -> Tensor:
        return super()._get_grad_inner_tensor(grad).reshape(1)
