"""Functions of torch.jit with tensors of the sequence: they run as the Python that they were made of, whose functions have rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor

_SCRIPTED: Any = torch._C.ScriptFunction


@contextmanager
def scripted_functions_in_python() -> Iterator[None]:
    """Call the Python of a scripted or traced function where it is given a tensor of the sequence, while this is entered."""
    original = _SCRIPTED.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch keeps it there for torch.compile, which looks into such functions likewise.
        python = getattr(self, "_torchdynamo_inline", None)
        if python is not None and any(isinstance(each, GlobalTensor) for each in tree_leaves((args, kwargs))):
            return python(*args, **kwargs)
        return original(self, *args, **kwargs)

    _SCRIPTED.__call__ = call
    try:
        yield
    finally:
        _SCRIPTED.__call__ = original
