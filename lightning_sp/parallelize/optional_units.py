"""Units of FSDP that a step may run on some ranks only: towers of images and sounds, where a data-parallel group's batch holds none.

A unit is gathered from all ranks when it runs, and its gradients are reduced when its backward ends. In a step in which groups differ, all
ranks gather these units before the forward and reduce them after the backward, whoever runs them:

    gather -> forward, backward without communication of theirs -> reduce -> release
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_sp.parallelize.parameter_groups import parameter_groups
from lightning_sp.parallelize.unused_parameters import expect_gradients

_ATTRIBUTE = "_lightning_sp_optional_units"


def find_optional_units(root: nn.Module) -> None:
    """Remember the units of a sharded module's towers."""
    setattr(root, _ATTRIBUTE, OptionalUnits(root))


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
        units = dict.fromkeys(unit for tower in towers for unit in tower.modules() if isinstance(unit, FSDPModule))
        self._root, self.units = root, list(units)
        self._syncs: list[bool] | None = None

    def gather(self) -> None:
        """Gather their parameters until `release`. Every rank must call it.

        Communicates: an all-gather for each.
        """
        if self._syncs is not None:
            return
        groups = parameter_groups(self.units)
        self._syncs = [group.reduce_grads for group in groups]
        expect_gradients(self._root, groups)
        for unit in self.units:
            unit.unshard()
            self._keep_whole(unit, True)
        for group in groups:
            group.reduce_grads = False

    def reduce(self) -> None:
        """Reduce their gradients, zeros where this rank has none; nothing where they are not gathered. Every rank must call it.

        Communicates: a reduce-scatter for each, unless gradients accumulate without communication.
        """
        for group, sync in zip(parameter_groups(self.units), self._syncs or (), strict=False):
            group.reduce_grads = sync
            group.post_backward()
            group.finalize_backward()
            group.reduce_grads = False

    def release(self) -> None:
        """Free their parameters."""
        if self._syncs is None:
            return
        for group, sync in zip(parameter_groups(self.units), self._syncs, strict=True):
            group.reduce_grads = sync
        for unit in self.units:
            self._keep_whole(unit, False)
            unit.reshard()
        self._syncs = None

    def _keep_whole(self, unit: FSDPModule, whole: bool) -> None:
        # Of the unit alone: what lies within is a unit of its own.
        unit.set_reshard_after_forward(not whole, recurse=False)
        unit.set_reshard_after_backward(not whole, recurse=False)

    def __len__(self) -> int:
        return len(self.units)


def _is_tower(module: nn.Module) -> bool:
    """Return whether a module is a Hugging Face model of something else than text."""
    return hasattr(module, "main_input_name") and "input_ids" not in inspect.signature(type(module).forward).parameters
