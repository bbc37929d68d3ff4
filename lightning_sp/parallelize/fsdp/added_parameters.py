"""Parameters that are put into a model after FSDP2 has sharded it: refused by name, for they would be lost, or each rank's own."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups
from lightning_sp.parameter_names import user_name


def check_added(root: nn.Module) -> None:
    """Refuse a parameter that is to be trained and that FSDP2 does not know. Equal on all ranks that did the same.

    FSDP2 puts its own parameter back where another was put in its place; what is new has values of each rank's own.

    Args:
        root: the sharded model.

    Raises:
        SequenceParallelError: with the first of them.
    """
    added = [name for name, each in root.named_parameters() if each.requires_grad and not isinstance(each, DTensor)]
    if not added:
        return
    # A unit that is gathered, after an evaluation say, shows its whole parameters.
    groups = parameter_groups(fsdp_modules(root))
    known = {id(getattr(each, "_unsharded_param", None)) for group in groups for each in group.fsdp_params}
    for name in added:
        parameter = root.get_parameter(name)
        if id(parameter) not in known:
            raise SequenceParallelError(
                f"{user_name(name)}, of shape {tuple(parameter.shape)}, was put into the model after it was sharded: FSDP2 knows another "
                "parameter there, or none, and each rank has values of its own; write to the one that is there (under torch.no_grad(): "
                "weight.copy_(values)), or build the part in __init__ or configure_model"
            )
