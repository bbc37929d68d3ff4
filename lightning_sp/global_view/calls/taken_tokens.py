"""Tokens that were taken out of a sequence, whole on every rank: on one device a view, here a copy.

What is written to it is written to the sequence, too. What is computed of it is a plain tensor. What autograd is asked of it, a hook say, is of
this tensor itself: FSDP2 gathers a unit's weights for the backward by a hook of what the unit gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_sp.global_view.calls.call import is_sequence, writes
from lightning_sp.global_view.tensors.copied_views import CopiedView

# Functions that give views.
VIEWS = {
    *(
        "getitem", "select", "narrow", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "unfold", "diagonal", "as_strided",
        "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "squeeze", "unsqueeze", "expand", "iter", "detach",
    ),
}  # fmt: skip

# Of attributes these are the names.
_OF_AUTOGRAD = {
    *("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_"),
    *("requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "output_nr"),
}


class TakenTokens(Tensor):
    """A plain tensor that knows the sequence that it was taken of.

    Attributes:
        of: what it is a copy of, or shares the memory of such a copy.
    """

    of: CopiedView

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what a function does to plain tensors; write what it writes to the sequence, too."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        taken = [each for each in tree_leaves((args, given)) if isinstance(each, cls)]
        for each in taken:
            each.of.renew()
        if _is_of_autograd(func, name):
            # An alias of the same memory has a history of its own, which nothing computed goes through.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        first = args[0] if args and (writes(func) or name == "__setitem__" or given.get("inplace")) else None
        written = [each for each in tree_leaves((first, given.get("out"))) if isinstance(each, cls)]
        plain_args, plain_kwargs = tree_map_only(cls, plain, (args, given))
        result = func(*plain_args, **plain_kwargs)
        for each in written:
            each.of.write()
        if written:
            return written[0] if isinstance(result, Tensor) else result
        return marked(result, taken[0].of) if name.strip("_") in VIEWS else result


def _is_of_autograd(func: Any, name: str) -> bool:
    """Return whether a function asks or tells of a tensor's history, and nothing of its numbers."""
    if name in ("__get__", "__set__"):
        return func.__self__.__name__ in _OF_AUTOGRAD
    return name in _OF_AUTOGRAD or func is torch.autograd.grad


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory that is no subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def sources(tensor: Tensor) -> list[Tensor]:
    """Return what a tensor's history begins with once it is written to, on this rank: what it is a view of, or a copy that stands for one."""
    if is_sequence(tensor):
        part, copied = tensor._local, tensor.placement.copied  # type: ignore[attr-defined]
    elif isinstance(tensor, TakenTokens):
        part, copied = plain(tensor), tensor.of
    elif type(tensor) is Tensor:
        part, copied = tensor, None
    else:
        return []
    bases = [] if part._base is None else [part._base]
    return bases if copied is None else [*bases, copied.source._local, *sources(copied.source)]


def marked(value: Any, of: CopiedView) -> Any:
    """Return a structure whose plain tensors are known to have the memory of a copy."""

    def mark(tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor:
            return tensor
        result = tensor.as_subclass(TakenTokens)
        result.of = of
        return result

    return tree_map_only(Tensor, mark, value)


def taken(source: Any, take: Callable[[], Tensor], put: Callable[[Tensor], None], address: Any = None) -> Tensor:
    """Return what was taken out of a sequence, whole on every rank.

    Args:
        source: a tensor of the sequence.
        take: takes it.
        put: writes it back.
        address: as of `CopiedView`.
    """
    copy = take()
    of = CopiedView(source=source, copy=copy, take=take, put=lambda: put(copy), address=address)
    result: Tensor = marked(copy, of)
    return result
