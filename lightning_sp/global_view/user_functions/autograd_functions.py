"""A user's `autograd.Function` with tensors of the sequence.

One that computes number by number runs on this rank's part: its forward is watched, and calls pointwise functions of torch alone. Its first
call is tried beside one of twice the tokens (`functions_of_tokens`): what it gives a token, forward and backward, is that of the token alone,
whatever stands beside it, and a gradient n times as large gives n times as much. Any other is refused, for what it does along the sequence is
not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.call import NO_RULE, Call, placed, users_line
from lightning_sp.global_view.placement import part_of
from lightning_sp.global_view.rules.pointwise import RANDOM, RULES, aligned, like_another, pointwise, to
from lightning_sp.global_view.rules.properties import RULES as PROPERTIES
from lightning_sp.global_view.sequence_tensor import GlobalTensor, SequenceTensor
from lightning_sp.global_view.table import name_of
from lightning_sp.global_view.user_functions.functions_of_tokens import check_tokens_alone


class _Watched(TorchFunctionMode):
    """Notes whether every function that is called is pointwise, and what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.is_pointwise = True
        self.made: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = name_of(func)
        if name not in PROPERTIES:
            is_known = RULES.get(name) in (pointwise, to, like_another) and name not in RANDOM
            self.is_pointwise &= is_known or _keeps_shape(name, args, result)
            self.made += tree_leaves(result)
        return result


def _keeps_shape(name: str, args: Any, result: Any) -> bool:
    """Return whether a function of shapes leaves every number where it is: `x.view_as(x)`, as a gradient's reversal returns its input."""
    return name in ("view", "view_as", "reshape", "expand_as") and args[0].shape == result.shape


def watching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands in the place of `torch.autograd.Function.apply`, which is given."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(each, GlobalTensor) for each in tree_leaves((args, kwargs))):
            return original(cls, *args, **kwargs)
        call = Call(
            name=cls.__name__, function=lambda *given, **named: original(cls, *given, **named), args=args, kwargs=kwargs
        )
        if _multiplies_tokens(cls, call):
            return placed(call.on_locals(), call.tensors[0].placement)
        found = aligned(call) if call.tensors and cls is not BackwardHookFunction else NO_RULE
        if found is NO_RULE:
            raise _refusal(cls)
        local, placement = found
        shape = torch.broadcast_shapes(*(each.local.shape for each in call.tensors))  # type: ignore[no-untyped-call]
        watched = _Watched()
        try:
            with watched:
                result = local.on_locals()
        except Exception as error:  # whatever a function makes of a part of its sequence
            raise _refusal(cls) from error
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if not watched.is_pointwise or not watched.made or any(each.shape != shape for each in outputs):
            raise _refusal(cls)
        check_tokens_alone(cls, original, local, placement, partial(_refusal, cls))
        return placed(result, placement)

    return apply


@contextmanager
def watched_functions(in_progress: Callable[[], bool]) -> Iterator[None]:
    """Run pointwise functions of a user's on this rank's part while this is entered, and refuse others.

    Args:
        in_progress: whether a step that sees whole sequences is.
    """
    own = torch.autograd.Function.__dict__.get("apply")
    original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    apply = watching(original)
    grad = torch.autograd.grad
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    torch.autograd.grad = partial(_gradient, grad, in_progress)
    try:
        yield
    finally:
        torch.autograd.grad = grad
        if own is None:
            del torch.autograd.Function.apply
        else:
            torch.autograd.Function.apply = own  # type: ignore[method-assign]


def _multiplies_tokens(cls: Any, call: Call) -> bool:
    """Return whether a function is torchao's float8 product of tokens with a whole weight; its recipe is checked with the model."""
    if cls.__name__ != "matmul_with_hp_or_float8_args" or not cls.__module__.startswith("torchao."):
        return False
    return (
        len(call.tensors) == 1
        and call.args[0] is call.tensors[0]
        and call.args[0].placement.dim < call.args[0].dim() - 1
    )


def _gradient(
    original: Callable[..., Any], in_progress: Callable[[], bool], outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
) -> Any:  # fmt: skip
    """Return gradients of tensors of the sequence, as adversarial training asks for them: each rank has a loss, which is whole."""
    if not in_progress() or torch.compiler.is_compiling():  # which differentiates what it traces
        return original(outputs, inputs, grad_outputs, *args, **kwargs)
    given = [each for each in tree_leaves(inputs)]
    if not all(isinstance(each, SequenceTensor) for each in given):
        raise SequenceParallelError(
            f"global_view: torch.autograd.grad inside of a step ({users_line()}): of a weight it would be this rank's share, for gradients are "
            "added up when the step's backward has ended; use the gradients in on_before_optimizer_step, or global_view=False with "
            "lightning_sp.reductions"
        )
    if (args[1] if len(args) > 1 else kwargs.get("create_graph", False)) or kwargs.get("is_grads_batched"):
        raise SequenceParallelError(
            f"global_view: torch.autograd.grad with create_graph=True inside of a step ({users_line()}): the gradient of a gradient goes "
            "through what ranks send each other, which is differentiated once; write the derivative with functions of torch, or hand the "
            "function lightning_sp.reductions.unshard(x), the whole on every rank"
        )
    several = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    seeds = [None] * len(several) if grad_outputs is None else tree_leaves([grad_outputs])
    ranks = given[0].placement.storage.layout.size
    pairs = [_of_rank(output, seed, ranks) for output, seed in zip(several, seeds, strict=True)]
    found = original(
        [each for each, _ in pairs], [each.local for each in given], [each for _, each in pairs], *args, **kwargs
    )
    return tuple(
        None if gradient is None else SequenceTensor(gradient / ranks, each.placement)
        for gradient, each in zip(found, given, strict=True)
    )


def _of_rank(output: Tensor, seed: Any, ranks: int) -> tuple[Tensor, Any]:
    """Return this rank's part of what is differentiated, and of its gradient: of a whole loss each rank has one of its own."""
    if not isinstance(output, SequenceTensor):
        return output, seed
    if seed is None:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    own = output.placement
    local = seed.local if isinstance(seed, SequenceTensor) else part_of(seed, own)
    return output.local, own.without_padding(local, 0) * ranks


def _refusal(cls: Any, why: str = "") -> SequenceParallelError:
    if cls is CheckpointFunction:
        return SequenceParallelError(
            f"global_view: torch.utils.checkpoint with use_reentrant=True of a tensor of the sequence ({users_line()}): its backward runs the "
            "function again by itself, out of sight of the rules; pass use_reentrant=False"
        )
    if why:
        return SequenceParallelError(
            f"global_view: {cls.__name__}, an autograd.Function, with a tensor of the sequence ({users_line()}): {why}, and a rank has its part "
            "of the tokens, and a gradient that is scaled; write it with functions of torch, or hand it lightning_sp.reductions.unshard(x), the "
            "whole on every rank"
        )
    if cls is BackwardHookFunction:
        return SequenceParallelError(
            f"global_view: a backward hook of a module ({users_line()}) would see the gradient of this rank's part of a tensor of the sequence; "
            "use a hook of a parameter, or write what the hook does into the forward"
        )
    return SequenceParallelError(
        f"global_view: {cls.__name__}, an autograd.Function, with a tensor of the sequence ({users_line()}): its forward does more than compute "
        "number by number with functions of torch, so what it does along the sequence is not known; write it with functions of torch, or hand "
        "it lightning_sp.reductions.unshard(x), the whole on every rank"
    )
