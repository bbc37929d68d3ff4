"""Parameters that are put into a model or taken out after FSDP2 has sharded it: refused by name, for they would be lost, or each rank's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups
from lightning_sp.parameter_names import user_name


def check_added(root: nn.Module) -> None:
    """Refuse a parameter that is to be trained and that FSDP2 does not know. Equal on all ranks that did the same.

    FSDP2 puts its own parameter back where another was put in its place, or none; what is new has values of each rank's own.

    Args:
        root: the sharded model.

    Raises:
        SequenceParallelError: with the first of them.
    """
    groups = parameter_groups(fsdp_modules(root))
    present = set(root.modules())
    for each in (each for group in groups for each in group.fsdp_params):
        for module, name in _places(each):
            held = vars(module)["_parameters"].get(name)
            if module in present and held is None:
                raise SequenceParallelError(_taken_out(user_name(each._param_fqn or name)))
            if module in present and isinstance(held, DTensor) and held is not each.sharded_param:
                raise SequenceParallelError(_lost(user_name(each._param_fqn or name)))
    added = [name for name, each in root.named_parameters() if not isinstance(each, DTensor) and each.requires_grad]
    if not added:
        return
    # A unit that is gathered, after an evaluation say, shows its whole parameters.
    known = {id(getattr(each, "_unsharded_param", None)) for group in groups for each in group.fsdp_params}
    for name in added:
        parameter = root.get_parameter(name)
        if id(parameter) not in known:
            raise SequenceParallelError(
                f"{user_name(name)}, of shape {tuple(parameter.shape)}, was put into the model after it was sharded: FSDP2 knows another "
                "parameter there, or none, and each rank has values of its own; write to the one that is there (under torch.no_grad(): "
                "weight.copy_(values)), or build the part in __init__ or configure_model"
            )


@contextmanager
def refuse_lost_parameters() -> Iterator[None]:
    """Refuse in a step's code a parameter that is put in a sharded one's place: a gather puts that one back, and the step goes on with it.

    What is put there while the unit is whole, in its own forward say, is used by that forward, as on one device.

    Raises:
        SequenceParallelError: where it is put. Equal on all ranks that do the same.
    """

    def check(module: nn.Module, name: str, parameter: Any) -> None:
        held = vars(module)["_parameters"].get(name)
        if isinstance(held, DTensor) and held is not parameter and not _is_gathering():
            raise SequenceParallelError(_lost(f"{name} of a {type(module).__name__}"))

    handle = register_module_parameter_registration_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _is_gathering() -> bool:
    """Return whether FSDP2 shows its own: of a module with a `__setattr__` of its own, an nn.GRU say, as a user would."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(4):  # register_parameter, and the two `__setattr__`
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp"):
            return True
        frame = frame.f_back
    return False


def _places(parameter: Any) -> list[tuple[nn.Module, str]]:
    """Return where modules show a parameter of FSDP2's: those that are tied show it in several places."""
    info = parameter._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def _lost(which: str) -> str:
    return (
        f"{which} has another parameter put in its place after it was sharded, which FSDP2 takes out again with the next gather: the model "
        "would go on with its own; tie weights in __init__ or configure_model (self.head.weight = self.embedding.weight), use the other weight "
        "in the forward (F.linear(x, self.embedding.weight)), or write values (under torch.no_grad(): weight.copy_(values))"
    )


def _taken_out(which: str) -> str:
    return (
        f"{which} is no parameter of its module any more, since it was sharded (pruning, torch.nn.utils.parametrize and weight norm make it "
        "another one), and FSDP2 puts it back with the next gather; do so before: in __init__ or configure_model. To prune in the course of a "
        "fit keep a mask: under torch.no_grad() weight.mul_(mask), in on_train_batch_end"
    )
