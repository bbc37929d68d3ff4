"""FSDP2's units after a forward that was left by an error: torch before 2.13 has no function for that, and a later one that drops gradients."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups


def abandon_forward(root: nn.Module) -> None:
    """Free what a forward without an end has gathered, and let the next one begin as the first. Gradients stay.

    A unit in which the error was raised counts as running: it would not free its parameters, and shards would be written to where they are
    not. Every rank must call it, and only where no backward of that forward is to come.

    Args:
        root: the sharded module.
    """
    units = fsdp_modules(root)
    for unit in units:
        state: Any = unit._get_fsdp_state()
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        if hasattr(state, "_modules_to_run_forward"):
            state._modules_to_run_forward.clear()
    for group in parameter_groups(units):
        if group._all_gather_result is not None:  # ahead of a unit that has not run
            group.wait_for_unshard()
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()
        group._training_state = TrainingState.IDLE
        group.reshard()
