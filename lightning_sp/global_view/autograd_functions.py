"""A user's `autograd.Function` with tensors of the sequence: refused, for its backward would be lost.

Its forward would compute on what is shown, outside of any history, and what it returns would have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.call import users_line
from lightning_sp.global_view.sequence_tensor import GlobalTensor


@contextmanager
def refused_functions() -> Iterator[None]:
    """Refuse tensors of the sequence as arguments of an `autograd.Function` while this is entered."""
    own = torch.autograd.Function.__dict__.get("apply")
    original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, GlobalTensor) for each in tree_leaves((args, kwargs))):
            raise SequenceParallelError(
                f"global_view: {cls.__name__}, an autograd.Function, with a tensor of the sequence ({users_line()}): its backward is not "
                "known to the rules; write it with functions of torch, or give it lightning_sp.reductions.unshard(x), the whole on every rank"
            )
        return original(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if own is None:
            del torch.autograd.Function.apply
        else:
            torch.autograd.Function.apply = own  # type: ignore[method-assign]
