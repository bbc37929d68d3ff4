"""In which dtype FSDP2 gathers a weight: in bfloat16 where autocast would cast it to that anyway, and nothing else reads it.

    under autocast, not known yet      float32, and each rank notes how the weight is read
    cast only, on all ranks            bfloat16: half the bytes
    read otherwise on any rank         float32
    outside of autocast                float32: a forward by a callback, the preflight's comparison in float32

Weights of linear layers and convolutions are asked about, those of units below the root. The answers travel with those about unused
parameters, after a backward, and hold for all ranks from the end of the next backward on. The gradients are those of a float32 weight, bit by
bit: `autocast_weight` is below autograd.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_sp.parallelize.fsdp.parameter_groups import parameter_groups
from lightning_sp.parameter_names import user_name
from lightning_sp.weights.autocast import ROUNDED, AutocastWeight, WeightReads

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PRODUCTS = {nn.Linear.forward, *(each.forward for each in _CONVOLUTIONS)}
_CONV_1D = ("transformers.pytorch_utils", "Conv1D")


class GatherDtypes:
    """The weights that may be gathered in bfloat16; a class because how they are read shows as a model runs.

    Args:
        units: the sharded modules, without the root.
    """

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        groups = [_Group(group) for group in parameter_groups(units) if _num_shards(group) > 1]
        self._weights = [weight for group in groups for weight in group.weights]
        self._known: tuple[list[_Weight], Tensor] | None = None

    @property
    def num_rounded(self) -> int:
        """How many weights are gathered in bfloat16 under autocast."""
        return sum(weight.rounded is True for weight in self._weights)

    def answers(self) -> Tensor:
        """Return what this rank knows of the weights that are not decided: for each a flag that it was cast, and one that it was read."""
        asked = [weight.reads for weight in self._undecided()]
        return torch.tensor([[reads.cast, bool(reads.other)] for reads in asked], dtype=torch.uint8).view(-1)

    def learn(self, answers: Tensor) -> None:
        """Note the largest of all ranks' answers. `decide` is called later: some ranks learn them earlier than others."""
        self._known = self._undecided(), answers.view(-1, 2)

    def decide(self) -> None:
        """Let the weights that were learned of be gathered by it from now on. Every rank must call it between the same two gathers."""
        known, self._known = self._known, None
        for weight, (cast, other) in zip(*known, strict=True) if known is not None else ():
            if cast or other:
                weight.rounded = not other

    def _undecided(self) -> list[_Weight]:
        return [weight for weight in self._weights if weight.rounded is None]


class _Group:
    """Those of one unit; a class because a backward gathers as the forwards before it did.

    Args:
        group: FSDP2's.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        # Whether a forward with gradients ran outside of autocast; and whether a backward has begun after it.
        self._needs_float32 = self._needed = False
        self.weights = [_Weight(each) for each in group.fsdp_params if _may_be_cast(each)]
        if self.weights:
            group.unshard = partial(self._unshard, group.unshard)

    def _unshard(self, unshard: Any, async_op: bool = False) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        casts = self._backward_casts() if in_backward else self._forward_casts()
        group = self._group
        if group.is_unsharded and not casts and any(weight.is_rounded for weight in self.weights):
            group._to_sharded()  # what stayed whole from a forward under autocast is not what this one reads
        gathers = not group.is_unsharded and group._all_gather_result is None
        for weight in self.weights:
            weight.reads.noted = casts and weight.rounded is None
            if not in_backward:
                weight.enter_graph(casts=casts, gathers=gathers)
            if gathers:
                weight.gather(casts=casts)
        return unshard(async_op)

    def _forward_casts(self) -> bool:
        device = self._group.device.type
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == ROUNDED
        if torch.is_grad_enabled():
            self._needs_float32 = not casts or (self._needs_float32 and not self._needed)
            self._needed = False
        return casts

    def _backward_casts(self) -> bool:
        """Return whether the forwards of this backward were all under autocast: others have saved views of the weights in float32."""
        self._needed = True
        return not self._needs_float32


class _Weight:
    """A parameter of FSDP2's; a class because its memory for either dtype stays.

    Args:
        parameter: FSDP2's.

    Attributes:
        rounded: whether it is gathered in bfloat16 under autocast; None while that is not known.
        reads: what this rank has seen of it.
    """

    def __init__(self, parameter: Any) -> None:
        self.rounded: bool | None = None
        self.reads = WeightReads(user_name(parameter._param_fqn or parameter._module_info.param_name))
        self._parameter = parameter
        self._outputs: dict[torch.dtype | None, list[Tensor]] = {}
        self._notes = self._is_plain = False
        parameter.init_unsharded_param = partial(self._show, parameter.init_unsharded_param)

    @property
    def is_rounded(self) -> bool:
        """Whether it was gathered in bfloat16 when it was last."""
        return bool(self._parameter.param_dtype == ROUNDED)

    def enter_graph(self, *, casts: bool, gathers: bool) -> None:
        """Choose, once, whether it notes how it is read: a leaf that is in a graph gets its gradient, and none may take its place.

        Args:
            casts: whether the forward that begins is under autocast.
            gathers: whether it is gathered now.
        """
        if self._is_plain:
            self.reads.other = "a forward that began before the first gather under autocast"
        elif not self._notes:
            self._notes = casts and gathers
            self._is_plain = not self._notes and torch.is_grad_enabled()

    def gather(self, *, casts: bool) -> None:
        """Choose the dtype of the next gather."""
        each, dtype = self._parameter, ROUNDED if casts and self.rounded else None
        self.reads.name = user_name(each._param_fqn or self.reads.name)
        if each.param_dtype != dtype:
            self._outputs[each.param_dtype], each.all_gather_outputs = (
                each.all_gather_outputs,
                self._outputs.pop(dtype, []),
            )
            each.param_dtype = dtype

    def _show(self, init_unsharded_param: Any) -> None:
        """Have the weight after its gather: one that notes how it is read, from the first one under autocast on."""
        each = self._parameter
        if not hasattr(each, "_unsharded_param"):
            init_unsharded_param()
        if not self._notes:
            return
        whole, gathered = each._unsharded_param, each.all_gather_outputs[0]
        if isinstance(whole, AutocastWeight):
            # The same leaf in either dtype: its gradient may be that of several micro-batches.
            if whole.numbers.dtype != gathered.dtype:
                whole.numbers = _whole(gathered, each)
            return
        each._unsharded_param = nn.Parameter(
            AutocastWeight(_whole(gathered, each), self.reads), each.sharded_param.requires_grad
        )
        each._unsharded_param.grad = whole.grad


def _whole(gathered: Tensor, parameter: Any) -> Tensor:
    return torch.as_strided(gathered, parameter._orig_size, parameter._contiguous_orig_stride, storage_offset=0)


def _may_be_cast(parameter: Any) -> bool:
    """Return whether a parameter is the weight of a linear layer or a convolution, in float32. One with a forward of its own is none."""
    module, name = parameter._module_info.module, parameter._module_info.param_name
    # transformers' Conv1D is GPT-2's linear layer.
    is_product = type(module).forward in _PRODUCTS or (type(module).__module__, type(module).__name__) == _CONV_1D
    return is_product and name == "weight" and parameter.sharded_param.dtype == torch.float32


def _num_shards(group: Any) -> int:
    return int(getattr(group.mesh_info, "shard_mesh_size", 1))
