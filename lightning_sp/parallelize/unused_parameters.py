"""Parameters that a step uses on some ranks only: experts without a token there, a part of the model that a group's batch does not need.

FSDP2 reduces the gradients of a unit as one buffer of those that exist. Where ranks differ in which exist, buffers of different sizes meet:
a hang, or gradients of different parameters are added up. Here a rank without a gradient gives zeros. What no rank has used has none in
the end, as on one device, where an optimizer leaves it as it is.

A unit must run on all ranks or on none, for its parameters are gathered from all of them; `optional_units` are the exception.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from lightning_sp import comm
from lightning_sp.parallelize.parameter_groups import parameter_groups

_ATTRIBUTE = "_lightning_sp_unused_parameters"


def complete_gradients(root: nn.Module, units: Iterable[FSDPModule]) -> None:
    """Let each unit of FSDP reduce a gradient for every parameter, zeros where this rank has none.

    Args:
        root: remembers which ones were used, for `drop_unused_gradients`.
        units: the sharded modules.
    """
    setattr(root, _ATTRIBUTE, _UsedParameters(parameter_groups(units)))


def expect_gradients(root: nn.Module, groups: Iterable[Any]) -> None:
    """Let parameter groups reduce zeros until the next optimizer step though they did not run here: they did on another rank."""
    used: _UsedParameters = getattr(root, _ATTRIBUTE)
    used.ran.update(number for number, each in enumerate(used.groups) if each in set(groups))


def drop_unused_gradients(root: nn.Module | None, group: ProcessGroup | None) -> None:
    """Give parameters that no rank has used since the last call no gradient in place of zeros. Every rank must call it.

    Args:
        root: the sharded module.
        group: the world, on a backend for host tensors.

    Communicates: one all_reduce of 16 bytes; where ranks used different parameters, one of a byte for each parameter.
    """
    used = None if root is None else getattr(root, _ATTRIBUTE, None)
    if used is not None:
        used.drop_unused(group)


class _UsedParameters:
    """Which parameters got a gradient; a class because units tell it in their backward and the optimizer step asks."""

    def __init__(self, groups: Iterable[Any]) -> None:
        self.groups = list(groups)
        # By the parameter's number among all of them.
        self.used: set[int] = set()
        self.zeros: set[int] = set()
        self.ran: set[int] = set()
        first = 0
        for number, each in enumerate(self.groups):
            each.pre_forward = partial(self._pre_forward, number, each.pre_forward)
            each.post_backward = partial(self._post_backward, number, first, each.post_backward)
            first += len(each.fsdp_params)
        self.total = first

    def _pre_forward(self, number: int, pre_forward: Any, *args: Any) -> Any:
        if torch.is_grad_enabled():
            self.ran.add(number)
        return pre_forward(*args)

    def _post_backward(self, number: int, first: int, post_backward: Any, *args: Any) -> None:
        group = self.groups[number]
        for index, each in enumerate(group.fsdp_params, first):
            if _gradient(each) is not None:
                self.used.add(index)
            # A unit that has not run here has run nowhere, unless it is optional: nobody waits for its gradients.
            elif group.reduce_grads and number in self.ran and each.sharded_param.requires_grad:
                if each.sharded_param.grad is None:
                    self.zeros.add(index)
                each.unsharded_param.grad = torch.zeros_like(each.unsharded_param)
        post_backward(*args)

    def drop_unused(self, group: ProcessGroup | None) -> None:
        used, zeros = self.used, self.zeros
        self.used, self.zeros, self.ran = set(), set(), set()
        if comm.size_of(group or comm.world()) > 1 and not comm.all_equal(_digest(used), group):
            flags = torch.zeros(self.total, dtype=torch.uint8)
            flags[sorted(used)] = 1
            used = set(comm.largest(flags, group).nonzero().flatten().tolist())
        for index, each in enumerate(self._parameters()):
            if index in zeros and index not in used:
                each.sharded_param.grad = None

    def _parameters(self) -> Iterator[Any]:
        for each in self.groups:
            yield from each.fsdp_params


def _digest(numbers: set[int]) -> torch.Tensor:
    text = ",".join(map(str, sorted(numbers)))
    return torch.tensor(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big"))


def _gradient(parameter: Any) -> Any:
    """Return what the backward has left on a parameter of FSDP2, None where nothing or where it was never whole."""
    if not hasattr(parameter, "_unsharded_param"):
        return None
    if parameter.unsharded_accumulated_grad is not None:
        return parameter.unsharded_accumulated_grad
    return parameter.unsharded_param.grad
