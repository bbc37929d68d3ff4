"""Tokens that were taken out of a sequence, whole on every rank: on one device a view, here a copy, which nothing may be written to.

What was written would be lost, without a word. What is computed of it is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.call import users_line, writes

# Functions that give views.
VIEWS = {
    *(
        "getitem",
        "select",
        "narrow",
        "chunk",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unbind",
        "unfold",
        "diagonal",
        "as_strided",
    ),
    *(
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "movedim",
        "squeeze",
        "unsqueeze",
        "expand",
        "iter",
        "detach",
    ),
}


class ReadOnly(Tensor):
    """A plain tensor that refuses to be written to."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do what a function does to plain tensors; refuse one that writes."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        written = [args[0]] if args and (writes(func) or name == "__setitem__" or given.get("inplace")) else []
        if any(isinstance(each, cls) for each in [*written, given.get("out")]):
            raise SequenceParallelError(
                f"global_view: {name} writes to tokens that were taken out of the sequence ({users_line()}): here they are a copy, and what is "
                "written would be lost; make a new tensor with torch.where, or write to one of the sequence, x.masked_fill_(mask, value)"
            )
        plain_args, plain_kwargs = tree_map_only(cls, _plain, (args, given))
        result = func(*plain_args, **plain_kwargs)
        return read_only(result) if name.strip("_") in VIEWS else result


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def read_only(value: Any) -> Any:
    """Return a structure whose plain tensors nothing may be written to."""

    def marked(tensor: Tensor) -> Tensor:
        return tensor.as_subclass(ReadOnly) if type(tensor) is Tensor else tensor

    return tree_map_only(Tensor, marked, value)
