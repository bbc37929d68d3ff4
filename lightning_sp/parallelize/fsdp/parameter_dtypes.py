"""A module that changes the dtype of its own parameters in its forward is refused: FSDP2 would go on with the values from before.

Such a module calls `self.classifier.to(torch.float32)` each time, as some routers of experts do. On one device the parameter is float32 from
then on. FSDP2 gathers into memory that the parameter no longer uses.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_sp.errors import SequenceParallelError


def refuse_changed_dtypes(root: nn.Module) -> None:
    """Look at the parameters of each sharded module once, after its first forward."""
    sharded = {each for each in root.modules() if isinstance(each, FSDPModule)}
    for name, module in root.named_modules():
        if module in sharded:
            dtypes = {each: parameter.dtype for each, parameter in module.named_parameters()}
            hooks: list[Any] = []
            # First, before FSDP2's own hook shards the parameters again.
            hooks.append(module.register_forward_hook(partial(_compare, name, dtypes, hooks), prepend=True))


def _compare(name: str, dtypes: dict[str, torch.dtype], hooks: list[Any], module: nn.Module, *_: Any) -> None:
    hooks.pop().remove()
    changed = {each: p.dtype for each, p in module.named_parameters() if p.dtype != dtypes.get(each, p.dtype)}
    if changed:
        first, dtype = next(iter(changed.items()))
        raise SequenceParallelError(
            f"{f'{name}.' if name else ''}{first} is {dtypes[first]}, and the model makes it {dtype} in its forward ({len(changed)} such in "
            f"{name or 'the model'}): FSDP2 would go on with its values from before; use a precision whose parameters are {dtype} "
            "(precision='32-true' or 'bf16-mixed' for float32), or an option of the model, as config.router_dtype is for routers of experts"
        )
