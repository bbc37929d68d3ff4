"""What users note on a weight: `self.A_log._no_weight_decay = True`, which an optimizer's groups or a forward go by.

FSDP2 makes a shard and a whole of each weight, two new parameters, and `module.to` may make a third. Here they have one dict of attributes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups

# Where FSDP2's object of a parameter keeps the dict.
_OWN = "_lightning_sp_attributes"
# What torch and this package note themselves.
_INTERNAL = frozenset({"_is_param", "_is_single_number", "_fsdp_orig_uid"})


def share_attributes(root: nn.Module) -> None:
    """Let a weight have its attributes in a step, where it is whole, as outside of it, where it is a shard.

    Args:
        root: the sharded model, whose shards have the attributes, or had them when this was called before.
    """
    for group in parameter_groups(fsdp_modules(root)):
        for each in group.fsdp_params:
            own = vars(each).get(_OWN)
            if own is not None:
                each.sharded_param.__dict__ = own
            elif vars(each.sharded_param).keys() - _INTERNAL:
                vars(each)[_OWN] = vars(each.sharded_param)
                each.init_unsharded_param = partial(_show, each, each.init_unsharded_param)


def _show(parameter: Any, init_unsharded_param: Any) -> None:
    """Have the whole weight behind its gather, with the attributes of its shard."""
    init_unsharded_param()
    whole, own = parameter._unsharded_param, vars(parameter)[_OWN]
    if type(whole) is nn.Parameter:
        whole.__dict__ = own
    else:  # one of a class of this package has attributes of its own
        vars(whole).update(own)
