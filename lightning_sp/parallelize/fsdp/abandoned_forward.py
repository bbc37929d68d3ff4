"""FSDP2's units after a forward or backward that was left by an error: torch before 2.13 has no function for that, later ones drop gradients."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, gather_here, parameter_groups


def abandon_forward(root: nn.Module) -> None:
    """Free what a forward without an end has gathered, and let the next one begin as the first. Gradients stay, but for a backward's.

    A unit in which the error was raised counts as running: it would not free its parameters, and shards would be written to where they are
    not. Every rank must call it, and only where no backward of that forward is to come.

    Args:
        root: the sharded module.
    """
    units = fsdp_modules(root)
    is_within_backward = False
    for unit in units:
        state: Any = unit._get_fsdp_state()
        is_within_backward |= state._state_ctx.post_backward_final_callback_queued
        state._state_ctx.post_backward_final_callback_queued = False
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        if hasattr(state, "_modules_to_run_forward"):
            state._modules_to_run_forward.clear()
    for group in parameter_groups(units):
        if not hasattr(group.comm_ctx, "post_forward_order"):
            continue  # what a first forward makes: a user's own unit, which is refused later, has not run
        if group._all_gather_result is not None:  # ahead of a unit that has not run
            group.wait_for_unshard()
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()
        group._training_state = TrainingState.IDLE
        if is_within_backward:
            _drop_gradients(group)
        for each in group.fsdp_params:
            if hasattr(each, "_unsharded_param"):
                gather_here(each)  # the next forward would find what was assigned to a whole parameter's `data`
        group.reshard()


def drop_accumulated(root: nn.Module) -> None:
    """Drop the gradients of whole weights that a window of micro-batches without a step has left: `zero_grad` knows those of shards alone."""
    for group in parameter_groups(fsdp_modules(root)):
        _drop_whole(group)


def _drop_whole(group: Any) -> None:
    for each in group.fsdp_params:
        each.unsharded_accumulated_grad = None
        if hasattr(each, "_unsharded_param"):
            each._unsharded_param.grad = None


def _drop_gradients(group: Any) -> None:
    """Drop what a backward without an end has not reduced, and what it holds for that."""
    _drop_whole(group)
    group.finalize_backward()
    group._partial_reduce_output = None
    # A list from torch 2.13 on.
    if hasattr(group.comm_ctx, "reduce_scatter_states"):
        group.comm_ctx.reduce_scatter_states.clear()
    else:
        group.comm_ctx.reduce_scatter_state = None
