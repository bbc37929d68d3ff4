"""A step of some of an optimizer's parameters: by the groups' own numbers, and with the states of the one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def step_only(optimizer: Optimizer, step: Callable[..., Any], chosen: Collection[Tensor], **options: Any) -> None:
    """Step these parameters of an optimizer, which is shown no others meanwhile; nothing where none is its own.

    Args:
        optimizer: whose parameters some of them are.
        step: its step.
        chosen: parameters; a set.
        options: of the step.
    """
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    try:
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = [each for each in parameters if each in chosen]
        optimizer.param_groups = [group for group in groups if group["params"]]
        if optimizer.param_groups:
            step(**options)
    finally:
        optimizer.param_groups = groups
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = parameters
