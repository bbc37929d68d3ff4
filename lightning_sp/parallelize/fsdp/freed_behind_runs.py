"""Behind a run a forward frees what it has gathered, the root's parameters too: what a script then writes to a weight, it writes to its shard.

model(ids)                        FSDP2 would leave the root's weights whole
model.head.weight[0].zero_()      and free them later, with what is written here
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups

# What groups of parameters do behind a forward in a run, while there is none.
_IN_RUN: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@contextmanager
def freed_behind_run(root: nn.Module) -> Iterator[None]:
    """Let each unit free its parameters behind a forward from the run's end on, until the next one begins.

    Args:
        root: the sharded module.
    """
    groups = parameter_groups(fsdp_modules(root))
    for group in groups:
        group.post_forward_mesh_info = _IN_RUN.pop(group, group.post_forward_mesh_info)
    try:
        yield
    finally:
        for group in groups:
            _IN_RUN[group] = group.post_forward_mesh_info
            group.post_forward_mesh_info = group.mesh_info


def is_behind_run(unit: Any) -> bool:
    """Return whether a unit is called while its model is in no run."""
    return any(group in _IN_RUN for group in parameter_groups([unit]))
