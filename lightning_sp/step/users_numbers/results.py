"""Numbers of the user's own that are results, no counts: the last loss, a gradient's norm, a history of them. A step, or a hook, keeps them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_sp.step.users_numbers.counters import Counter, added, numbers_of

# Numbers of a tensor that may be a history of results.
LONGEST_HISTORY = 4096


class Result(NamedTuple):
    """A number that a step leaves.

    Args:
        owner: an object, a dict, or a list of numbers.
        name: of the attribute or entry; of a list, none.
        value: what it left: a number, of a list all.
    """

    owner: Any
    name: Any
    value: Any


class NumbersOfHooks(NamedTuple):
    """What hooks, and steps before a trial, have left of the user's numbers.

    Args:
        counters: that have counted batches.
        results: that have changed since the fit began.
        lines: of the step, which trials of the fit have shown other numbers; each adds its own.
    """

    counters: Sequence[Counter]
    results: Sequence[Result]
    lines: set[str]


def numbers_and_lists_of(owner: Any) -> dict[Any, Any]:
    """Return what one of `owners_of_numbers` holds: `numbers_of` it, on a device too, NumPy's, histories; of a list all, without a name."""
    if isinstance(owner, (list, deque)):
        return {None: list(owner)}
    held = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    others = {name: _plain(value) for name, value in held.items() if _is_other(value)}
    return {**numbers_of(owner, on_device=True), **others}


def _is_other(value: Any) -> bool:
    """Return whether a value has numbers that `numbers_of` leaves out."""
    return isinstance(value, np.floating) or _is_number_of_ranks(value) or _is_history(value)


def _is_number_of_ranks(value: Any) -> bool:
    """Return whether a value is a gradient's norm, say, as FSDP2's gradients give it: this rank may have a part of the sum, or nothing."""
    if not isinstance(value, DTensor) or value.requires_grad or not value.is_floating_point():
        return False
    return bool(value.numel() == 1 and value.to_local().numel() == 1)


def _plain(value: Any) -> Any:
    if isinstance(value, DTensor):  # it changes as the whole does
        return float(value.to_local().detach())
    return float(value) if isinstance(value, np.floating) else value.tolist()


def _is_history(value: Any) -> bool:
    is_plain = type(value) is Tensor and not value.requires_grad and value.is_floating_point() and not value.is_meta
    return is_plain and value.dim() == 1 and 1 < value.numel() <= LONGEST_HISTORY


def became_result(before: Any, value: Any) -> bool:
    """Return whether a number with a fraction, as no count has, or a list with one, has taken another's place."""
    return _is_result(value) and value != before and not added(before, value)


def _is_result(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return any(type(each) is float and not each.is_integer() and math.isfinite(each) for each in numbers)
