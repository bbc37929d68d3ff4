"""What one rank alone has of a module of which each rank holds the rest: other numbers in a buffer, a hook more, a `forward` of its own.

    buffers        whole on every rank, and in no update: a rank that writes its own computes with it, and a checkpoint has rank 0's
    hooks          a rank's own changes what it computes, or its part of a gradient

A preflight sees neither what comes behind it. Both are looked at every `EVERY_STEPS` optimizer steps, before a checkpoint and at the end of
a fit: as one number, on the host. What a step computes otherwise on one rank, by random numbers of its own say, leaves no trace there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.mesh import SequenceMesh
from lightning_sp.parameter_names import user_name
from lightning_sp.step.agreement.rank_buffers import whole_buffers
from lightning_sp.step.agreement.replicas import EVERY_STEPS, hash_of_bits

_BUFFER, _NUMBERS = "the buffer ", " with numbers of hash "
_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class RankAloneWatch:
    """Warns once in a run of what one rank alone has; a class because it keeps when it has looked last."""

    def __init__(self) -> None:
        self._step = 0
        self._said = False

    def start_run(self, step: int) -> None:
        """Begin to count at an optimizer step."""
        self._step, self._said = step, False

    def watch(self, root: nn.Module, step: int, mesh: SequenceMesh, group: ProcessGroup | None) -> None:
        """Compare where it is time to. Every rank must call it at the same step. As `compare`."""
        if step >= self._step + EVERY_STEPS:
            self._step = step
            self.compare(root, step, mesh, group)

    def compare(self, root: nn.Module, step: int, mesh: SequenceMesh, group: ProcessGroup | None) -> None:
        """Warn once in a run of what ranks do not have alike. Every rank must call it.

        Args:
            root: the sharded module.
            step: optimizer steps so far, for the message.
            mesh: the attention's.
            group: the world, on a backend for host objects.

        Communicates: one all_reduce of 16 bytes; where ranks differ, what each has, by name.
        """
        if self._said or comm.size_of(group or comm.world()) == 1:
            return
        own = {**_buffers(root, mesh), **_hooks(root)}
        if comm.all_equal(torch.tensor([comm.digest_of(own)]), group):
            return
        told = comm.told_differences(_comparable(comm.gather_objects(own, group), mesh.tensor_parallel_size))
        if told:
            self._said = True
            rank_zero_warn(
                f"after {step} optimizer steps ranks have other things in the model: {told}. What a rank computes by its own is not one "
                "device's, and a checkpoint has rank 0's buffers: write buffers and register hooks on all ranks, from what all know "
                "(averaged by torch.distributed, or broadcast from rank 0); a hook of one rank that only reads, a logger's say, changes nothing"
            )


def _buffers(root: nn.Module, mesh: SequenceMesh) -> dict[str, str]:
    """Return the numbers of what every rank holds whole; of data-parallel ranks with whole sequences rank 0's stand for all."""
    if mesh.layout.size == 1 and mesh.data_parallel_size > 1:
        return {}
    buffers = {name: each for name, each in whole_buffers(root).items() if _has_plain_bits(each)}
    if not buffers:
        return {}
    numbers = torch.stack([hash_of_bits(each.detach()) for each in buffers.values()]).tolist()
    return {
        f"{_BUFFER}{user_name(name)}": f"{tuple(buffer.shape)}{_NUMBERS}{number & 0xFFFFFFFF:08x}"
        for (name, buffer), number in zip(buffers.items(), numbers, strict=True)
    }


def _has_plain_bits(buffer: Tensor) -> bool:
    return not (buffer.is_meta or buffer.layout != torch.strided or hasattr(buffer, "__tensor_flatten__"))


def _hooks(root: nn.Module) -> dict[str, str]:
    """Return which hooks modules and weights have, and which modules have a `forward` of their own."""
    found = {}
    for name, module in root.named_modules():
        if hooks := _names(getattr(module, kind) for kind in _OF_MODULES):
            found[f"the hooks of {user_name(name) or 'the LightningModule'}"] = hooks
        if "forward" in vars(module):
            found[f"the forward of {user_name(name)}"] = _name(module.forward)
    for name, weight in root.named_parameters():
        if hooks := _names(getattr(weight, kind, None) or {} for kind in _OF_PARAMETERS):
            found[f"the hooks of {user_name(name)}"] = hooks
    return found


def _names(kinds: Iterable[Mapping[int, Any]]) -> str:
    return ", ".join(_name(each) for hooks in kinds for each in hooks.values())


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _comparable(of_ranks: Sequence[Mapping[str, str]], tensor_parallel_size: int) -> list[dict[str, str]]:
    """Leave out buffers that ranks may have otherwise: of other shapes, as caches that grow with a batch's length; parts, of split layers."""
    left_out = set()
    for name in {name for each in of_ranks for name in each if name.startswith(_BUFFER)}:
        values = [each.get(name, "") for each in of_ranks]
        same_parts = [len(set(values[part::tensor_parallel_size])) == 1 for part in range(tensor_parallel_size)]
        if len({each.partition(_NUMBERS)[0] for each in values}) > 1 or (tensor_parallel_size > 1 and all(same_parts)):
            left_out.add(name)
    return [{name: value for name, value in each.items() if name not in left_out} for each in of_ranks]
