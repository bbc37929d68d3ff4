"""Collectives of torch.distributed with tensors of the sequence: refused, for these have no memory that could be sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.call import users_line
from lightning_sp.global_view.sequence_tensor import GlobalTensor

_NAMES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "broadcast", "reduce", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_tensor",
)  # fmt: skip


@contextmanager
def collectives_refused() -> Iterator[None]:
    """Refuse a collective that is given a tensor of the sequence, while this is entered."""
    module: Any = torch.distributed
    before = {name: getattr(module, name) for name in _NAMES}
    for name, function in before.items():
        setattr(module, name, _checked(name, function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, GlobalTensor) for each in tree_leaves((args, kwargs))):
            raise SequenceParallelError(
                f"global_view: torch.distributed.{name} of a tensor of the sequence ({users_line()}): it shows the whole, and has no memory to "
                "send; what sums, means and maxima over the sequence give is whole on each rank already, over other data-parallel groups add it "
                "up with group=self.trainer.strategy.data_parallel_group; lightning_sp.reductions.unshard(x) makes the tensor whole"
            )
        return function(*args, **kwargs)

    return collective
