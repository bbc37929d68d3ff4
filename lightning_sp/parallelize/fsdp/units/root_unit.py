"""The root unit of FSDP2: layers and parameters that are direct children of the LightningModule, whole while its step runs.

FSDP2 gathers them when a step begins and frees them when a backward ends. Manual optimization has several backwards in a step, and a step may
write to what is whole: a target network that follows, weights that are clamped.

    step begins    gather      step uses, writes    -> shards      backward ends    free      step uses again    gather again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, gather_here, parameter_groups
from lightning_sp.parallelize.fsdp.unused_parameters import used_parameters
from lightning_sp.parameter_names import user_name


class RootUnit:
    """The root unit while a step runs; a class because whole parameters are those of the shards only until an optimizer steps.

    Args:
        root: the LightningModule.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._groups = parameter_groups([root]) if isinstance(root, FSDPModule) else []
        self._parameters = [each for group in self._groups for each in group.fsdp_params]
        self._stale = self._had_backward = False
        self._learned: dict[Any, bool] = {}  # whether each of its weights learned, when last looked at

    def note_switches(self) -> None:
        """Note, where a step begins, which weights of the root learn: a step may switch what is whole, or its shards."""
        self._learned = {each: each.sharded_param.requires_grad for each in self._parameters}

    def keep_written(self) -> None:
        """Write to the shards what the step has written to whole parameters: FSDP2 frees those, with what is in them."""
        self._switch(self._all())
        if self._stale:
            return  # the shards are newer
        with torch.no_grad():
            for group in self._groups:
                for each in group.fsdp_params if group.is_unsharded else ():
                    _to_shard(each._unsharded_param.detach(), each._sharded_local_tensor, group.mesh_info)
                    gather_here(each)

    def prepare_backward(self, loss: Tensor) -> Tensor:
        """Let a backward inside the step gather and reduce: FSDP2 does so for what the step returns alone."""
        self.keep_written()
        if not isinstance(self._root, FSDPModule):
            return loss
        state: Any = self._root._get_fsdp_state()
        prepared: Tensor = state._register_pre_backward_hook(loss)
        return prepared

    @contextmanager
    def used_again(self) -> Iterator[None]:
        """Gather for every use of a layer after a backward too, with the weights that an optimizer has left.

        Raises:
            SequenceParallelError: a backward left gradients on whole parameters: nobody would reduce them.
        """
        self.note_switches()
        layers = {each._module_info.module for each in self._parameters} - {self._root}
        hooks: list[RemovableHandle] = [layer.register_forward_pre_hook(self._gather, prepend=True) for layer in layers]
        hooks.append(register_optimizer_step_post_hook(self._note_step))
        hooks.append(register_optimizer_step_pre_hook(lambda *_: self.give_assigned()))
        backward = torch.autograd.backward

        def noted(*args: Any, **kwargs: Any) -> None:
            used = used_parameters(self._root)
            self._had_backward |= used is None or not used.is_set_aside
            backward(*args, **kwargs)

        self._had_backward, torch.autograd.backward = False, noted
        toggles = {name: vars(self._root).get(name) for name in ("toggle_optimizer", "untoggle_optimizer")}
        vars(self._root).update({name: self._toggling(getattr(self._root, name)) for name in toggles})
        try:
            yield
        finally:
            torch.autograd.backward = backward
            for name, before in toggles.items():
                vars(self._root).pop(name) if before is None else vars(self._root).update({name: before})
            for hook in hooks:
                hook.remove()
        for each in self._parameters:
            if hasattr(each, "_unsharded_param") and each._unsharded_param.grad is not None:
                raise _refusal(each)

    def give_assigned(self) -> None:
        """Give the shards what a step has assigned to `grad` of a parameter that is whole, alike on all ranks: an optimizer steps shards.

        Raises:
            SequenceParallelError: the step has had a backward, which leaves other gradients there.
        """
        for group in parameter_groups(fsdp_modules(self._root)):
            assigned = [
                each
                for each in group.fsdp_params
                if getattr(getattr(each, "_unsharded_param", None), "grad", None) is not None
            ]
            for each in assigned:
                whole = each._unsharded_param
                if self._had_backward:
                    raise _refusal(each)
                shard: DTensor = each.sharded_param
                # src_data_rank=None: every rank holds the whole and keeps its part.
                gradient = whole.grad.detach().reshape(shard.shape)
                given = distribute_tensor(gradient, shard.device_mesh, shard.placements, src_data_rank=None)
                shard.grad, whole.grad = given, None
            if assigned:
                group.reshard()  # hooks before the update find it at the shards

    def _note_step(self, *_: Any) -> None:
        self._stale = True
        self._switch(self._all())
        for unit in fsdp_modules(self._root)[1:]:  # what stays whole between forward and backward, a head say
            unit.reshard()

    def _gather(self, *_: Any) -> None:
        self._switch(self._parameters)
        for group in self._groups:
            if self._stale and group.is_unsharded:
                group.reshard()
            if not group.is_unsharded:
                group.unshard()
                group.wait_for_unshard()
                if torch.is_grad_enabled() and (used := used_parameters(self._root)) is not None:
                    used.expect([group])
        self._switch(self._parameters)
        self._stale = False

    def _toggling(self, toggle: Callable[..., None]) -> Callable[..., None]:
        def toggled(*args: Any, **kwargs: Any) -> None:
            self._switch(self._all())
            toggle(*args, **kwargs)  # of shards, which an optimizer has
            for each in self._all():
                if each.sharded_state == ShardedState.UNSHARDED:
                    each._unsharded_param.requires_grad_(each.sharded_param.requires_grad)

        return toggled

    def _all(self) -> list[Any]:
        return [each for group in parameter_groups(fsdp_modules(self._root)) for each in group.fsdp_params]

    def _switch(self, parameters: Iterable[Any]) -> None:
        """Have shards learn where their whole weights do, which `self.critic.requires_grad_(False)` in a step switches, or the reverse.

        FSDP2 carries a switch over where it gathers, from shards alone.
        """
        for each in parameters:
            shard = each.sharded_param
            if each.sharded_state == ShardedState.UNSHARDED:
                whole = each._unsharded_param
                if (
                    whole.requires_grad != shard.requires_grad
                ):  # of the root's the one that is not as before was switched
                    learns = not self._learned[each] if each in self._learned else whole.requires_grad
                    whole.requires_grad_(learns)
                    shard.requires_grad_(learns)
            if each in self._learned:
                self._learned[each] = shard.requires_grad


def _refusal(parameter: Any) -> SequenceParallelError:
    return SequenceParallelError(
        f"{user_name(parameter._param_fqn or '')} has a gradient outside of manual_backward, which no rank would add to the others': call "
        "self.manual_backward(loss) in the place of loss.backward(); and where a step reads or assigns gradients behind a backward, have its "
        "parameters from optimizer.param_groups, for a module shows whole ones while it runs"
    )


def _to_shard(whole: Tensor, shard: Tensor, mesh: Any) -> None:
    """Copy this rank's rows; not where they are rounded when they are gathered."""
    if whole.dtype != shard.dtype or isinstance(whole, DTensor) or not shard.numel():
        return
    size, rank = (mesh.shard_mesh_size, mesh.shard_mesh_rank) if hasattr(mesh, "shard_mesh_size") else (1, 0)
    whole = whole if whole.dim() else whole.reshape(1)  # a single number
    rows = -(-len(whole) // size)
    with _unsafe_preserve_version_counter(
        (shard,)
    ):  # a penalty that has read the shard finds the numbers that the step has left
        shard.copy_(whole[rank * rows : rank * rows + len(shard)])


def write_counts(root: nn.Module) -> dict[str, int]:
    """Return how often each parameter of the other units was written to while it was whole: FSDP2 frees it with what is in it."""
    parameters = [each for group in parameter_groups(fsdp_modules(root)[1:]) for each in group.fsdp_params]
    whole = [each for each in parameters if hasattr(each, "_unsharded_param")]
    return {user_name(each._param_fqn or ""): each._unsharded_param._version for each in whole}
