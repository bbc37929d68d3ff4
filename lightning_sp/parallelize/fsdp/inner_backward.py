"""Gradients of sharded weights that a step asks for by itself: `torch.autograd.grad(loss, list(self.model.parameters()))`.

A sharded weight is in no graph: what is, FSDP2 has gathered for a forward, and reduces in a backward. So the gradients are those of a backward
of its own, which leaves none behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups
from lightning_sp.parallelize.fsdp.units.root_unit import RootUnit
from lightning_sp.parallelize.fsdp.unused_parameters import used_parameters


def gradients_of_weights(
    root: nn.Module, loss: Tensor, weights: Sequence[Tensor], *, keep_graph: bool
) -> list[Tensor | None]:
    """Return the gradients of a number, which every rank has alike, by sharded weights: shards of the mean over all ranks.

    What units had gathered for the step is gathered again where it was whole. No gradient and no hook of the step's own backward sees this one.

    Args:
        root: the sharded LightningModule.
        loss: shape ().
        weights: as modules show them outside of their forward.
        keep_graph: whether the graph of `loss` has another backward.

    Communicates: what a backward does.

    Raises:
        SequenceParallelError: one of the weights is none of the module's own.
    """
    own = {id(each.sharded_param): each for group in _groups(root) for each in group.fsdp_params}
    if any(id(each) not in own for each in weights):
        raise SequenceParallelError(
            "torch.autograd.grad by what was made of a sharded weight, or by its data: ask for the gradient of the parameter itself, as "
            "self.model.parameters() gives it"
        )
    with _set_aside(root, loss):
        torch.autograd.backward(RootUnit(root).prepare_backward(loss), retain_graph=keep_graph)
        return [own[id(each)].sharded_param.grad for each in weights]


@contextmanager
def without_reduction(root: nn.Module) -> Iterator[None]:
    """Let a backward go through units of FSDP2 without one of their parameters: gathered for it, freed after it, and nothing else."""
    groups = _groups(root)
    before = [group.reduce_grads for group in groups]
    for group in groups:
        group.reduce_grads = False
    used = used_parameters(root)
    try:
        with _whole_as_before(groups), nullcontext() if used is None else used.keeping_calls():
            yield
    finally:
        for group, reduces in zip(groups, before, strict=True):
            group.reduce_grads = reduces


def gathering_again(root: nn.Module, gradients_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.autograd.grad for gradients that have a graph: their own backward gathers again the units that this one goes through.

    Args:
        root: the sharded LightningModule.
        gradients_of: torch's own.
    """

    def found_with_hooks(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        with _units_of_backward(root) as units:
            found: tuple[Tensor | None, ...] = gradients_of(*args, **kwargs)
        for each in found:
            if each is None or not each.requires_grad:
                continue
            for unit in units:
                each.register_hook(unit._get_fsdp_state()._pre_backward)  # type: ignore[no-untyped-call]
        return found

    return found_with_hooks


@contextmanager
def _units_of_backward(root: nn.Module) -> Iterator[list[Any]]:
    """Yield the units that a backward gathers while this is entered, the root aside, which stays whole."""
    found: list[Any] = []
    owners = {id(group): unit for unit in fsdp_modules(root)[1:] for group in parameter_groups([unit])}
    groups = [group for group in _groups(root) if id(group) in owners]

    def noting(group: Any) -> Callable[..., None]:
        before = group.pre_backward

        def noted(*args: Any) -> None:
            if owners[id(group)] not in found:
                found.append(owners[id(group)])
            before(*args)

        return noted

    with ExitStack() as undo:
        for group in groups:
            own = vars(group).get("pre_backward")  # of a call around this one, which a mode of torch hands on
            undo.callback(*((delattr, group, "pre_backward") if own is None else (setattr, group, "pre_backward", own)))
            group.pre_backward = noting(group)
        yield found


@contextmanager
def _set_aside(root: nn.Module, loss: Tensor) -> Iterator[None]:
    """Have no gradient while this is entered, reduce those that come, and have the step's own back afterwards."""
    groups = _groups(root)
    with ExitStack() as undo:
        undo.enter_context(_whole_as_before(groups))
        for group in groups:
            undo.callback(setattr, group, "reduce_grads", group.reduce_grads)
            group.reduce_grads = True
            for each in group.fsdp_params:
                _keep(undo, each, "unsharded_accumulated_grad")
                _keep(undo, each.sharded_param, "grad")
                if hasattr(each, "_unsharded_param"):
                    _keep(undo, each._unsharded_param, "grad")
        for leaf in _leaves(loss):
            _keep(undo, leaf, "grad")
        if (used := used_parameters(root)) is not None:
            undo.enter_context(used.set_aside())
        yield


def _keep(undo: ExitStack, owner: Any, name: str) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, None)


@contextmanager
def _whole_as_before(groups: Sequence[Any]) -> Iterator[None]:
    """Gather again what was whole before, for a backward frees what it went through."""
    whole = [group for group in groups if group.is_unsharded]
    try:
        yield
    finally:
        for group in whole:
            if not group.is_unsharded:
                group.unshard()
                group.wait_for_unshard()


def _groups(root: nn.Module) -> list[Any]:
    return parameter_groups(fsdp_modules(root))


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the plain tensors that a backward would leave a gradient in."""
    found, seen, to_do = [], set(), [loss.grad_fn]
    while to_do:
        node: Any = to_do.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None and not isinstance(leaf, DTensor):
            found.append(leaf)
        to_do += [each for each, _ in node.next_functions]
    return found
