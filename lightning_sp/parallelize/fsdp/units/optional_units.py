"""Units of FSDP that a step may run on some ranks only: towers of images and sounds, where a data-parallel group's batch holds none.

A unit is gathered from all ranks when it runs, and its gradients are reduced when its backward ends. In a step in which groups differ, all
ranks gather these units before the forward and reduce them after the backward, whoever runs them:

    gather -> forward, backward without communication of theirs -> reduce -> release
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

# What FSDP2 notes of a unit has no public name.
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lightning_sp.parallelize.fsdp.parameter_groups import parameter_groups
from lightning_sp.parallelize.fsdp.unused_parameters import used_parameters

_ATTRIBUTE = "_lightning_sp_optional_units"


def find_optional_units(root: nn.Module) -> None:
    """Remember the units of a sharded module's towers; a backward of it reduces and frees those that are whole then."""
    found = OptionalUnits(root)
    setattr(root, _ATTRIBUTE, found)
    if (used := used_parameters(root)) is not None:
        used.before_end = found.reduce


def optional_units(root: nn.Module) -> OptionalUnits:
    """Return those of a module; none where it is not sharded."""
    found: OptionalUnits | None = vars(root).get(_ATTRIBUTE)
    return OptionalUnits(nn.Module()) if found is None else found


@contextmanager
def gathered(root: nn.Module, uneven: bool) -> Iterator[None]:
    """Keep a module's optional units whole, if ranks may differ in which they run; a backward within reduces and releases them."""
    units = optional_units(root)
    if uneven:
        units.gather()
    try:
        yield
    finally:
        units.release()


class OptionalUnits:
    """The units of a model's towers; a class because they are whole from a step's start to its end.

    Args:
        root: the sharded module.

    Attributes:
        units: the sharded modules.
    """

    def __init__(self, root: nn.Module) -> None:
        towers = [each for each in root.modules() if _is_tower(each)]
        within = {unit for tower in towers for unit in tower.modules()}
        units = [each for each in root.modules() if isinstance(each, FSDPModule) and each is not root]
        self._root, self.units = root, [each for each in units if each in within or _holds_towers_alone(each)]
        self._syncs: list[bool] | None = None
        self._after_forward: list[Any] = []  # of each group, FSDP2's word for what it does after a forward

    def gather(self) -> None:
        """Gather their parameters until `release`. Every rank must call it.

        Communicates: an all-gather for each.
        """
        if self._syncs is not None:
            return
        groups = parameter_groups(self.units)
        self._syncs = [group.reduce_grads for group in groups]
        if (used := used_parameters(self._root)) is not None and torch.is_grad_enabled():
            used.expect(groups)
        self._after_forward = [group.post_forward_mesh_info for group in groups]
        for unit in self.units:
            unit.unshard()
            self._keep_whole(unit, True)
        for group in groups:
            group.reduce_grads = False

    def reduce(self) -> None:
        """Reduce their gradients, zeros where this rank has none, and release; nothing where they are not gathered. Every rank must call it.

        Communicates: a reduce-scatter for each, unless gradients accumulate without communication.
        """
        for group, sync in zip(parameter_groups(self.units), self._syncs or (), strict=False):
            group.reduce_grads = sync
            group.post_backward()
            group.finalize_backward()
            # A later backward in which it does not run ends it too.
            group._training_state = TrainingState.IDLE
        self.release()

    def release(self) -> None:
        """Free their parameters."""
        if self._syncs is None:
            return
        for group, sync in zip(parameter_groups(self.units), self._syncs, strict=True):
            group.reduce_grads = sync
        for unit in self.units:
            self._keep_whole(unit, False)
            unit.reshard()
        for group, after_forward in zip(parameter_groups(self.units), self._after_forward, strict=True):
            group.post_forward_mesh_info = after_forward
        self._syncs = None

    def _keep_whole(self, unit: FSDPModule, whole: bool) -> None:
        # Of the unit alone: what lies within is a unit of its own.
        unit.set_reshard_after_forward(not whole, recurse=False)
        unit.set_reshard_after_backward(not whole, recurse=False)

    def __len__(self) -> int:
        return len(self.units)


def _holds_towers_alone(module: nn.Module) -> bool:
    """Return whether the Hugging Face models in a module are towers, and there is one: a user's own around it."""
    models = [each for each in module.modules() if hasattr(each, "main_input_name")]
    return bool(models) and all(_is_tower(each) for each in models)


def _is_tower(module: nn.Module) -> bool:
    """Return whether a module is a Hugging Face model of something else than text."""
    return hasattr(module, "main_input_name") and "input_ids" not in inspect.signature(type(module).forward).parameters
