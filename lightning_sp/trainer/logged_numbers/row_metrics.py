"""torchmetrics of what the ranks of a sequence hold alike: each row counts once, so data-parallel groups alone are added up.

That is so in a batch without a sequence, and in the global view, which shows each rank the whole. Metrics of tokens, which each rank has some
of, are added up over the world. A metric that names its own ranks keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_sp import comm
from lightning_sp.global_view.tensors.sequence_tensor import whole_of

_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
# Of a state that is sent; torch's own limit of what it prints and pads is higher.
_MOST_DIMS = 16
# Longer lists and dicts of a module are no places of metrics.
_MOST_IN_A_LIST = 100


@dataclass(frozen=True)
class GatherOver:
    """A metric's `dist_sync_fn` over a group; users copy metrics in a run (`clone`, `MetricTracker`), and a group as an attribute has no copy.

    Args:
        group: the ranks; None is the world.
        own: the metric's own function.
    """

    group: ProcessGroup | None
    own: Callable[..., Any] | None

    def __call__(self, value: Tensor, group: Any = None) -> Any:
        """Gather over the group, unless another is given; of a step in the global view, what shows the sequence is made whole first."""
        ranks = self.group if group is None else group
        return (self.own or gather_all_tensors)(_as_others(whole_of(value), ranks), ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> GatherOver:
        """Return itself: a copy adds up over the same ranks."""
        return self

    def __reduce__(self) -> Any:
        """Give a file the metric's own function: another process has other groups."""
        return _itself, (self.own,)


def _as_others(value: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return a state in the dtype and dims of the ranks that hold something of it. Every rank must call it.

    Of a list that no step has added to torchmetrics sends an empty float vector, and of one with a single number that number: beside ranks
    with several steps' predictions they would gather other shapes than these.

    Communicates: one all_gather of 152 bytes.
    """
    shape = list(value.shape)
    if len(shape) > _MOST_DIMS:
        return value
    own = [value.numel(), _DTYPES.index(value.dtype), len(shape), *shape]
    own_numbers = torch.tensor(own + [0] * (_MOST_DIMS + 3 - len(own)), device=value.device)
    told = [each.tolist() for each in comm.gather(own_numbers, group or comm.world())]
    holding = [each for each in told if each[0]] or told
    # An update may change a state's dtype, which a rank of fillers has not had.
    dtype = reduce(torch.promote_types, [_DTYPES[number] for _, number, *_ in holding])
    if all(dims == 0 for _, _, dims, *_ in told):
        return value.to(dtype)
    if not value.numel() and holding is not told:
        _, _, dims, *theirs = holding[0]
        return value.new_empty((0, *theirs[1:dims]), dtype=dtype)
    return (value.reshape(1) if value.ndim == 0 else value).to(dtype)


def _itself(value: Any) -> Any:
    return value


class RowMetrics:
    """The ranks over which a run's metrics add up; a class because they follow the steps."""

    def __init__(self) -> None:
        self._follow_tokens = False  # all of them do

    def follow(self, holders: Sequence[Any], group: ProcessGroup | None, *, anew: bool = False) -> None:
        """Let metrics that name no ranks add up over one rank of each data-parallel group, or over those of all tokens.

        What a metric holds already was counted by a step of another view, training's say: it adds up as that did until it is reset.

        Args:
            holders: the module that holds them, and callbacks.
            group: the ranks with other rows, where the ranks of a sequence hold them alike; else those that hold each token once, None where
                these are all.
            anew: metrics were put back since.
        """
        if group is None and self._follow_tokens and not anew:
            return
        found = list(_without_ranks(holders))
        for each, counts in found:
            if not counts:
                each.dist_sync_fn = GatherOver(group, _own_gather(each))
        self._follow_tokens = group is None and all(
            isinstance(each.dist_sync_fn, GatherOver) and each.dist_sync_fn.group is None for each, _ in found
        )

    def release(self, holders: Sequence[Any]) -> None:
        """Give metrics their own function back, at the end of a run, but for those that still hold what its steps have counted."""
        self._follow_tokens = False
        for each, counts in _without_ranks(holders):
            if not counts:
                each.dist_sync_fn = _own_gather(each)


def _without_ranks(holders: Sequence[Any]) -> Iterator[tuple[Metric, bool]]:
    """Yield each metric that names no ranks, and whether the outermost that it is of holds what a step has counted."""
    for outermost in (each for holder in holders for _, each in outermost_metrics(holder)):
        counts = was_updated(outermost)
        yield from ((each, counts) for each in parts_of(outermost) if each.process_group is None)


def _own_gather(metric: Metric) -> Any:
    gather = metric.dist_sync_fn
    return gather.own if isinstance(gather, GatherOver) else gather


def make_whole(module: nn.Module) -> None:
    """Make what metrics keep of a step in the global view whole, which torchmetrics sends: predictions, say. Every rank must call it."""
    for _, outermost in outermost_metrics(module):
        for metric in parts_of(outermost):
            for name in metric._defaults:
                value = getattr(metric, name)
                if isinstance(value, list):
                    value[:] = whole_of(value)  # the lists of a collection's metrics may be one
                else:
                    setattr(metric, name, whole_of(value))


def was_updated(metric: Metric | MetricCollection) -> bool:
    """Return whether a metric, or one of its parts, holds what a step has counted."""
    return any(each.update_called for each in parts_of(metric))


def outermost_metrics(holder: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the metrics and collections of metrics of a module or a callback that are no part of another one, those in lists and dicts too."""
    for name, value in vars(holder).items():
        if _is_metric(value):  # of a callback: a module has them among its modules
            yield f"{prefix}{name}", value
        if isinstance(value, (list, tuple, dict)) and not name.startswith("_") and len(value) <= _MOST_IN_A_LIST:
            yield from ((f"{prefix}{name}.{key}", each) for key, each in _items(value) if _is_metric(each))
    for name, child in holder.named_children() if isinstance(holder, nn.Module) else ():
        path = f"{prefix}{name}"
        if _is_metric(child):
            yield path, child
        else:
            yield from outermost_metrics(child, f"{path}.")


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else enumerate(value)


def _is_metric(value: Any) -> bool:
    return isinstance(value, (Metric, MetricCollection))


def parts_of(metric: Metric | MetricCollection) -> list[Metric]:
    """Return a metric and those that it is made of."""
    return [each for each in metric.modules() if isinstance(each, Metric)]
