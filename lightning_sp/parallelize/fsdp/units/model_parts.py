"""Parts of a model that a step calls by themselves: `self.model.encoder(...)`, `self.model.lm_head(...)`.

FSDP2 gathers a unit's parameters in the unit's own forward. A step that calls a part of it from outside would meet sharded ones, so the
part's call stands for the unit's: it gathers before and frees after, and the backward likewise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from lightning_sp.parallelize.compilation import without_compilation
from lightning_sp.parallelize.fsdp.units.object_outputs import register_outputs_in_objects


def gather_for_parts(unit: nn.Module, units: Collection[nn.Module]) -> None:
    """Let every part of a sharded model be called by itself.

    Args:
        unit: the model, a unit of FSDP.
        units: all of them; what lies within another one gathers there.
    """
    if without_compilation(unit) is not unit:
        return
    calls = _Calls(unit)
    unit.register_forward_pre_hook(calls.enter_unit, prepend=True)
    unit.register_forward_hook(calls.leave_unit, always_call=True)
    for part in _parts(unit, units):
        part.register_forward_pre_hook(calls.enter_part, prepend=True, with_kwargs=True)
        part.register_forward_hook(calls.leave_part, always_call=True)


class _Calls:
    """The calls in progress of a unit and its parts; a class because FSDP gathers for the outermost one alone.

    Its methods are the hooks: a copy of the model gets hooks of its own.
    """

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit
        # Of each call whether it stands for the unit's.
        self.stands_for_unit: list[bool] = []

    def enter_unit(self, module: nn.Module, args: Any) -> None:
        self.stands_for_unit.append(False)

    def leave_unit(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stands_for_unit.pop()

    def enter_part(self, part: nn.Module, args: Any, kwargs: Any) -> Any:
        outermost = not self.stands_for_unit
        self.stands_for_unit.append(outermost)
        return self._state()._pre_forward(self.unit, args, kwargs) if outermost else None

    def leave_part(self, part: nn.Module, args: Any, output: Any) -> Any:
        if not self.stands_for_unit.pop() or output is None:  # what failed has no output
            return None
        register_outputs_in_objects(self.unit, output)
        return self._state()._post_forward(self.unit, args, output)

    def _state(self) -> Any:
        return self.unit._get_fsdp_state()  # type: ignore[operator]


def _parts(module: nn.Module, units: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules below one that hold parameters of its unit; not what lies in another unit, or in compiled code."""
    for child in module.children():
        if child in units:
            continue
        below = list(_parts(child, units))
        if below or any(True for _ in child.parameters(recurse=False)):
            yield child
        if without_compilation(child) is child:
            yield from below
