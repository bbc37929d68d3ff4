"""Collectives of torch.distributed that a user calls, in the global view: refused with tensors of the sequence, which have no memory to send.

Refused too where they would count the ranks of a sequence, which hold every number alike, each for itself: of a batch without a sequence in the
view of a part, too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor
from lightning_sp.users_line import users_line

_NAMES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "broadcast", "reduce", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_tensor", "all_gather_object", "gather_object",
)  # fmt: skip
_SUMS = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"}
_LISTS = {"all_gather", "all_gather_into_tensor", "gather", "all_gather_object", "gather_object"}
# Whose own calls are for ranks: this package's, Lightning's `sync_dist`, a metric's, `generate`'s of whether all ranks have ended.
_LIBRARIES = ("lightning_sp", "lightning", "pytorch_lightning", "torchmetrics", "transformers", "accelerate")
Rebind = Callable[[Callable[..., Any], Callable[..., Any], ExitStack], None]


@contextmanager
def collectives_refused(
    sizes: tuple[int, int] = (1, 1), rebind: Rebind | None = None, rows_alone: Callable[[], bool] | None = None
) -> Iterator[None]:
    """Refuse a collective that is given a tensor of the sequence, or that counts each rank of one, while this is entered.

    Args:
        sizes: how many ranks share a sequence, and how many data-parallel groups there are.
        rebind: binds the names of a model's files that are bound to a function to another one: `rebind(function, other, undo)`.
        rows_alone: whether the last batch holds no sequence, so that its ranks have all rows; None in the global view.
    """
    module: Any = torch.distributed
    with ExitStack() as undo:
        for name in _NAMES:
            function = getattr(module, name)
            checked = _checked(name, function, sizes, rows_alone)
            undo.callback(setattr, module, name, function)
            setattr(module, name, checked)
            if rebind is not None:
                rebind(function, checked, undo)
        yield


def _checked(
    name: str, function: Callable[..., Any], sizes: tuple[int, int], rows_alone: Callable[[], bool] | None
) -> Callable[..., Any]:
    where = (
        "global_view"
        if rows_alone is None
        else "a batch without a sequence, of which all ranks of a group run all rows"
    )
    signature = inspect.signature(function)

    @wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if rows_alone is not None and not rows_alone():
            return function(*args, **kwargs)
        if any(isinstance(each, GlobalTensor) for each in tree_leaves((args, kwargs))):
            raise SequenceParallelError(
                f"global_view: torch.distributed.{name} of a tensor of the sequence ({users_line()}): it shows the whole, and has no memory to "
                "send; what sums, means and maxima over the sequence give is whole on each rank already, over other data-parallel groups add it "
                "up with group=self.trainer.strategy.data_parallel_group; lightning_sp.reductions.unshard(x) makes the tensor whole"
            )
        caller = sys._getframe(1)
        if sizes[0] > 1 and _is_of_user(caller) and _counts_ranks(name, signature.bind(*args, **kwargs), caller):
            raise SequenceParallelError(f"{where}: {_counted(name, *sizes)}")
        return function(*args, **kwargs)

    return collective


def _counts_ranks(name: str, given: inspect.BoundArguments, caller: Any) -> bool:
    """Return whether what a collective gives has something of each rank of the world, of which the user has not said that it is meant."""
    given.apply_defaults()
    group = given.arguments.get("group")
    # torch's differentiable ones have the world as their default.
    by_default = group is torch.distributed.group.WORLD and _module_of(caller).startswith("torch.distributed.nn")
    if not (group is None or by_default) or name not in _SUMS | _LISTS:
        return False
    operation = given.arguments.get("op", torch.distributed.ReduceOp.SUM)
    return name in _LISTS or operation in (torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.PRODUCT)


def _is_of_user(frame: Any) -> bool:
    """Return whether a call comes of the user's code: torch's own differentiable collectives call these."""
    while frame is not None:
        module = _module_of(frame)
        if not module.startswith(("torch.", "lightning_sp.global_view.")):
            return module.partition(".")[0] not in _LIBRARIES
        frame = frame.f_back
    return False


def _module_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _counted(name: str, sequence: int, data: int) -> str:
    does = "adds up" if name in _SUMS else "gathers"
    return (
        f"torch.distributed.{name} {does} what all {sequence * data} ranks have ({users_line()}): the {sequence} ranks of a "
        f"sequence hold every number of it alike, so it would count {sequence} times; group=self.trainer.strategy.data_parallel_group has "
        f"one of each of the {data} data-parallel groups, self.all_gather gives theirs, ReduceOp.AVG is right as it is; "
        "group=torch.distributed.group.WORLD says that each rank is meant"
    )
