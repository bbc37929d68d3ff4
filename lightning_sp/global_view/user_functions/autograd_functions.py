"""A user's `autograd.Function` with tensors of the sequence.

One that computes number by number runs on this rank's part: its forward is watched, and calls pointwise functions of torch alone. Its first
call is tried beside one of twice the tokens (`functions_of_tokens`): what it gives a token, forward and backward, is that of the token alone,
whatever stands beside it. Any other runs by the rules of what its forward and backward call (`functions_by_rules`).

A reentrant checkpoint is one that is not: its backward would run the function again by itself, out of sight of the rules.

torch's own `ModIndex` is what `padding[row, key]` calls in a mask function of FlexAttention or transformers, mapped by torch.vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction
from torch.distributed.tensor import DTensor
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from lightning_sp.context.streams import streams
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.calls.all_positions import of_all_positions
from lightning_sp.global_view.calls.call import NO_RULE, Call, placed
from lightning_sp.global_view.rules.pointwise import RANDOM, RULES, aligned, like_another, pointwise, to
from lightning_sp.global_view.rules.properties import RULES as PROPERTIES
from lightning_sp.global_view.table import name_of, scores_made
from lightning_sp.global_view.tensors.placement import Placement
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor, SequenceTensor
from lightning_sp.global_view.user_functions.functions_by_rules import Refusal, by_rules
from lightning_sp.global_view.user_functions.functions_of_tokens import are_tokens_alone
from lightning_sp.users_line import users_line

# What torch 2.11's checkpoint keeps its inputs in; it computes nothing, and has no backward.
_SAVES_INPUTS: Any = getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)


class _Watched(TorchFunctionMode):
    """Notes whether every function that is called is pointwise, and what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.is_pointwise = True
        self.made: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = name_of(func)
        if name not in PROPERTIES or name == "data_ptr":  # of a kernel
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
        if cls is BackwardHookFunction:
            raise _hook_refusal()
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        if cls is _SAVES_INPUTS:
            return original(cls, *args, **kwargs)
        if cls.__name__ == "ModIndex" and cls.__module__.startswith("torch."):
            return original(cls, of_all_positions(*args), *args[1:], **kwargs)
        refusal = partial(_refusal, cls)
        args = _with_numbers(args, refusal)
        call = Call(
            name=cls.__name__, function=lambda *given, **named: original(cls, *given, **named), args=args, kwargs=kwargs
        )
        if _multiplies_tokens(cls, call):
            return placed(call.on_locals(), call.tensors[0].placement)
        key = _key_of(cls, call)
        if key not in _ways:
            _ways[key] = bool(call.tensors) and _is_of_each_token(cls, original, call)
        return _on_parts(call, refusal) if _ways[key] else by_rules(cls, args, kwargs, refusal=refusal, key=key)

    return apply


# Whether a function is one of each token by itself, by what it was given.
_ways: dict[Any, bool] = {}


def _key_of(cls: Any, call: Call) -> Any:
    """Return what is the same on all ranks, and for calls that are alike."""
    leaves = tree_leaves((call.args, call.kwargs))
    return cls, *(
        (
            tuple(size == 1 for size in each.shape),
            each.dtype,
            each.placement.dim if isinstance(each, SequenceTensor) else None,
        )
        if isinstance(each, Tensor)
        else str(each)
        for each in leaves
    )


def _is_of_each_token(cls: Any, original: Callable[..., Any], call: Call) -> bool:
    """Return whether a function computes number by number, as all ranks of the sequence find by copies of what it is given."""
    storage = call.tensors[0].placement.storage
    with streams(call.tensors[0].device):
        found = _number_by_number(call.copied())
        if found is not None:
            local, placement, _ = found
            found = found if are_tokens_alone(cls, original, local, placement) else None
    try:
        storage.agree(None if found else cls.__name__)
    except SequenceParallelError:
        return False
    return True


def _number_by_number(call: Call) -> tuple[Call, Placement, Any] | None:
    """Run a function on this rank's part: return that call, where the sequence of its result is, and the result; None where it does more.

    A result has the shape of what its arguments broadcast to.
    """
    try:
        found = aligned(call)
        if found is NO_RULE:
            return None
        shape = torch.broadcast_shapes(*(each.local.shape for each in call.tensors))  # type: ignore[no-untyped-call]
    except RuntimeError:  # of shapes that are no function's of single numbers: a mask of rows beside their vectors
        return None
    local, placement = found
    watched = _Watched()
    try:
        with watched:
            result = local.on_locals()
    except Exception:  # whatever a function makes of a part of its sequence
        return None
    outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
    if not watched.is_pointwise or not watched.made or any(each.shape != shape for each in outputs):
        return None
    return local, placement, result


def _on_parts(call: Call, refusal: Refusal) -> Any:
    found = _number_by_number(call)
    if found is None:
        raise refusal("it computes number by number in one call, and not in another")
    _, placement, result = found
    return placed(result, placement)


def _with_numbers(args: tuple[Any, ...], refusal: Refusal) -> tuple[Any, ...]:
    """Return arguments with scores of an attention made, and what was taken of a sequence as the plain tensor that it is.

    Raises:
        SequenceParallelError: a weight is sharded.
    """
    if any(isinstance(each, DTensor) or hasattr(each, "is_term") for each in args if isinstance(each, Tensor)):
        raise refusal("it is given a weight outside of the layer that has it, of which a rank has a part")
    noted = [each for each in args if isinstance(each, GlobalTensor) and not isinstance(each, SequenceTensor)]
    made = scores_made(noted)
    return tuple(made.get(id(each), each) for each in args)


def _checkpointed(run_function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """Do what a reentrant checkpoint does without being one: it has a gradient where an argument has, for results that stand in no list."""
    if not torch.is_grad_enabled() or not any(isinstance(each, Tensor) and each.requires_grad for each in args):
        with torch.no_grad():
            return run_function(*args)
    result = checkpoint(run_function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    if isinstance(result, tuple):
        return tuple(each if isinstance(each, Tensor) else _detached(each) for each in result)
    return result if isinstance(result, Tensor) else _detached(result)


def _detached(value: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, value)


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


def _multiplies_tokens(cls: Any, call: Call) -> bool:
    """Return whether a function is torchao's float8 product of tokens with a whole weight; its recipe is checked with the model."""
    if cls.__name__ != "matmul_with_hp_or_float8_args" or not cls.__module__.startswith("torchao."):
        return False
    return (
        len(call.tensors) == 1
        and call.args[0] is call.tensors[0]
        and call.args[0].placement.dim < call.args[0].dim() - 1
    )


def _refusal(cls: Any, why: str) -> SequenceParallelError:
    return SequenceParallelError(
        f"global_view: {cls.__name__}, an autograd.Function, with a tensor of the sequence ({users_line()}): {why}, and a rank has its part of "
        "the tokens, and a gradient that is scaled; write it with functions of torch, or hand it lightning_sp.reductions.unshard(x), the whole "
        "on every rank"
    )


def _hook_refusal() -> SequenceParallelError:
    return SequenceParallelError(
        f"global_view: a backward hook of a module ({users_line()}) would see the gradient of this rank's part of a tensor of the sequence; "
        "use a hook of a parameter, or write what the hook does into the forward"
    )
