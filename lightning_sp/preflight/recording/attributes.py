"""What a step leaves in plain attributes of the user's modules, as numbers: what a later step reads of them is no buffer that is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sp.parameter_names import user_name

# Behind a name, in messages.
ATTRIBUTE = " (attribute)"
# Classes of these hold what they count by shapes, caches say.
_LIBRARIES = {
    "torch",
    "transformers",
    "peft",
    "torchmetrics",
    "lightning",
    "lightning_fabric",
    "builtins",
    "abc",
    "typing",
}


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and tensors in attributes of the user's modules, tensors copied, by the name that a user would write."""
    return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in _attributes(module)}


def changed_attributes(module: nn.Module, before: Mapping[str, Any]) -> dict[str, float]:
    """Return what has changed since, each as one number: a tensor's norm, its shape in the name.

    Args:
        module: the same.
        before: of `attributes_of`.
    """
    found = {}
    for name, value in _attributes(module):
        old = before.get(name)
        if isinstance(value, Tensor):
            if not isinstance(old, Tensor) or value.shape != old.shape or not torch.equal(value, old):
                shape = f" of shape {tuple(value.shape)}" if value.dim() else ""
                found[f"{name}{shape}{ATTRIBUTE}"] = (
                    float(value.detach().double().norm()) if value.numel() != 1 else float(value.detach())
                )
        elif value != old:
            found[f"{name}{ATTRIBUTE}"] = float(value)
    return found


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, each in module.named_modules():
        if all(base.__module__.partition(".")[0] in _LIBRARIES for base in type(each).__mro__):
            continue
        prefix = ".".join(["self", *([user_name(path)] if path else [])])
        for name, value in vars(each).items():
            if isinstance(value, (bool, DTensor, nn.Parameter)):
                continue
            if isinstance(value, (int, float)) or (
                isinstance(value, Tensor) and not value.is_complex() and not value.is_meta
            ):
                yield f"{prefix}.{name}", value
