"""A user's `autograd.Function` with tensors of the sequence.

One that computes number by number runs on this rank's part: its forward is watched, and calls pointwise functions of torch alone. Its first
call is tried beside one of twice the tokens (`functions_of_tokens`): what it gives a token, forward and backward, is that of the token alone,
whatever stands beside it, and a gradient n times as large gives n times as much. Any other is refused, for what it does along the sequence is
not known.

torch's own `ModIndex` is what `padding[row, key]` calls in a mask function of FlexAttention or transformers, mapped by torch.vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import _SingleLevelFunction
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.call import NO_RULE, Call, is_sequence, placed, users_line, whole_is_small
from lightning_sp.global_view.rules.pointwise import RANDOM, RULES, aligned, like_another, pointwise, to
from lightning_sp.global_view.rules.properties import RULES as PROPERTIES
from lightning_sp.global_view.sequence_tensor import GlobalTensor
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
        if cls.__name__ == "ModIndex" and cls.__module__.startswith("torch."):
            return original(cls, _of_all_positions(*args), *args[1:], **kwargs)
        if _multiplies_tokens(cls, call):
            return placed(call.on_locals(), call.tensors[0].placement)
        try:
            found = aligned(call) if call.tensors and cls is not BackwardHookFunction else NO_RULE
            shape = torch.broadcast_shapes(*(each.local.shape for each in call.tensors))  # type: ignore[no-untyped-call]
        # Of shapes that are no function's of single numbers: a mask of rows beside their vectors.
        except RuntimeError as error:
            raise _refusal(cls) from error
        if found is NO_RULE:
            raise _refusal(cls)
        local, placement = found
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
def watched_functions() -> Iterator[None]:
    """Run pointwise functions of a user's on this rank's part while this is entered, and refuse others."""
    # `scan = Scan.apply` at the top of a file keeps torch's own: that calls the one of the class before.
    function: Any = torch.autograd.Function

    def of_the_class_before(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)

    with (
        _replaced(function, classmethod(watching(function.apply.__func__))),
        _replaced(_SingleLevelFunction, classmethod(watching(of_the_class_before))),
    ):
        yield


@contextmanager
def _replaced(owner: Any, apply: Any) -> Iterator[None]:
    own = owner.__dict__.get("apply")
    owner.apply = apply
    try:
        yield
    finally:
        if own is None:
            del owner.apply
        else:
            owner.apply = own


def _of_all_positions(x: Any, indices: Any) -> Tensor:
    """Return a tensor of the sequence whole, for a function of positions that torch.vmap calls with all of them: its result is whole, too.

    Raises:
        SequenceParallelError: it has many numbers for each token, or is learned; or positions are of a part.
    """
    if not is_sequence(x) or any(map(is_sequence, indices)) or x.requires_grad or not whole_is_small(x):
        raise SequenceParallelError(
            f"global_view: a function of positions that torch.vmap calls with all of them reads {tuple(x.shape)} ({users_line()}), and a rank "
            "has its part of the sequence: that is carried where it reads few numbers of each token, a mask or documents, without a gradient; "
            "hand it lightning_sp.reductions.unshard(x), the whole on every rank"
        )
    x.placement.storage.note_reduction()
    # Ranks send each other numbers of their own, none of those that are mapped.
    with temporarily_clear_interpreter_stack():
        whole: Tensor = x.whole()
    return whole


def _multiplies_tokens(cls: Any, call: Call) -> bool:
    """Return whether a function is torchao's float8 product of tokens with a whole weight; its recipe is checked with the model."""
    if cls.__name__ != "matmul_with_hp_or_float8_args" or not cls.__module__.startswith("torchao."):
        return False
    return (
        len(call.tensors) == 1
        and call.args[0] is call.tensors[0]
        and call.args[0].placement.dim < call.args[0].dim() - 1
    )


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
