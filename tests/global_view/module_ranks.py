"""What runs in the ranks: a module with weights of its own in the global view, and on one device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.compiled.front_end import front_end
from lightning_sp.global_view.tensors.sequence_tensor import whole_of
from lightning_sp.global_view.user_functions.autograd_functions import watched_functions
from lightning_sp.global_view.user_functions.collectives import collectives_refused
from lightning_sp.global_view.user_functions.scripted_functions import scripted_functions_in_python
from lightning_sp.layout import pad, shard
from tests.global_view import compiled_ranks, rule_ranks
from tests.global_view.models.attention_modules import MODULES as OF_ATTENTION
from tests.global_view.models.library_blocks import BLOCKS
from tests.global_view.models.mixing_modules import MODULES as OF_MIXING
from tests.global_view.models.state_modules import MODULES as OF_STATES

MODULES: dict[str, Callable[[], nn.Module]] = {**OF_ATTENTION, **OF_MIXING, **OF_STATES, **BLOCKS}
_LOW = {torch.float32, torch.float16, torch.bfloat16}


class InFloat64(TorchFunctionMode):
    """What a model casts to a lower dtype stays float64: its roundings are no errors of the rules."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half):
            return args[0].double()

        def high(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value

        return func(*tree_map(high, args), **tree_map(high, kwargs or {}))


def made(name: str) -> nn.Module:
    torch.manual_seed(5)
    return MODULES[name]().double()


def called(run: Callable[..., Any], batch: Any, *, casts: bool = True) -> tuple[list[Tensor], list[Any]]:
    """Return the tensors of an output, and what else it has; in float64 alone what casts."""
    torch.manual_seed(11)
    with InFloat64() if casts else nullcontext():
        result = run(*batch)
    leaves = tree_leaves(result)
    return [each for each in leaves if isinstance(each, Tensor)], [
        each for each in leaves if not isinstance(each, Tensor)
    ]


def modules(names: list[str], length: int, ulysses: int, ring: int, compiled: bool = False) -> list[Any]:
    """Return for each module the largest relative error of outputs, gradients and buffers; or what was refused."""
    mesh = compiled_ranks.mesh_of(ulysses, ring)
    torch.set_default_dtype(torch.float64)
    try:
        return [_errors(name, length, mesh, compiled) for name in names]
    finally:
        torch.set_default_dtype(torch.float32)


def _errors(name: str, length: int, mesh: Any, compiled: bool) -> Any:
    one = made(name)
    inputs = rule_ranks.inputs(length)
    inputs[0].requires_grad_()
    wanted, others = called(one, inputs)
    rule_ranks.backward(wanted, 1.0)
    module = made(name)
    batch, leaf = rule_ranks.batch_of(length, mesh)
    run: Any = module
    if compiled:
        compiled_ranks.start()
        run = front_end("aot_eager").compiled(module.forward)
    try:
        with ExitStack() as stack:
            for each in (watched_functions(), scripted_functions_in_python(), collectives_refused()):
                stack.enter_context(each)
            found, beside = called(run, batch, casts=not compiled or _casts(name))
    except SequenceParallelError as error:
        return str(error)
    found = [whole_of(each * 1 if not each.is_complex() and each.is_floating_point() else each) for each in found]
    rule_ranks.backward(found, 1 / mesh.layout.size)
    mine = None
    if inputs[0].grad is not None:
        padded = pad(inputs[0].grad, mesh.layout.padded_length(length), dim=1, value=0)
        mine = shard(padded, mesh.layout, mesh.sequence_rank, dim=1)
    gradients = [
        p.grad if p.grad is None else comm.reduce_sum(p.grad, mesh.sequence_group) for p in module.parameters()
    ]
    return {
        "result": _distance(found, wanted) if beside == others else float("inf"),
        "gradient": _distance([leaf.grad, *gradients], [mine, *(p.grad for p in one.parameters())]),
        "buffers": _distance(list(module.buffers()), list(one.buffers())),
    }


def _casts(name: str) -> bool:
    """Return whether a module casts. No mode stands around the others: Dynamo takes its frames for the model's, and `x.shape[1]` for `x[1]`."""
    source = inspect.getsource(MODULES[name])
    return any(word in source for word in ("float", "half", "dtype", ".type(", ".to("))


def _distance(found: list[Any], wanted: list[Any]) -> float:
    """Return the largest error, of numbers above 1 in parts of the largest of their tensor."""
    largest = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        if theirs is None:
            largest = max(largest, 0.0 if ours is None else float(ours.abs().max()))
            continue
        theirs = theirs.detach()
        ours = torch.zeros_like(theirs) if ours is None else ours.detach()
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return float("inf")
        ours, theirs = (torch.view_as_real(each) if each.is_complex() else each.double() for each in (ours, theirs))
        alike = (ours == theirs) | (ours.isnan() & theirs.isnan())
        if bool(alike.all()):
            continue
        error = float(torch.where(alike, 0.0, (ours - theirs).abs()).max())
        scale = max(1.0, float(theirs.abs().nan_to_num(0.0, 0.0, 0.0).max()))
        largest = max(largest, error / scale if error == error else float("inf"))
    return largest
