"""torchmetrics of what the ranks of a sequence hold alike: each row counts once, so data-parallel groups alone are added up.

That is so in a batch without a sequence, and in the global view, which shows each rank the whole. Metrics of tokens, which each rank has some
of, are added up over the world. A metric that names its own ranks keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric, MetricCollection

from lightning_sp.global_view.sequence_tensor import whole_of

# Longer lists and dicts of a module are no places of metrics.
_MOST_IN_A_LIST = 100


class RowMetrics:
    """The ranks over which a run's metrics add up; a class because they follow the steps."""

    def __init__(self) -> None:
        self._given: dict[int, Metric] = {}  # to which a group was given, by their number

    def follow(self, holders: Sequence[Any], group: ProcessGroup | None) -> None:
        """Let metrics that name no ranks add up over one rank of each data-parallel group, over those of all tokens, or over the world again.

        What a metric holds already was counted by a step of another view, training's say: it adds up as that did until it is reset.

        Args:
            holders: the module that holds them, and callbacks.
            group: the ranks with other rows, where the ranks of a sequence hold them alike; else those that hold each token once, None where
                these are all; None at the end of a run.
        """
        if group is None and not self._given:
            return
        for _, outermost in (each for holder in holders for each in outermost_metrics(holder)):
            if not was_updated(outermost):
                for each in _parts(outermost):
                    self._follow(each, group)

    def _follow(self, metric: Metric, group: ProcessGroup | None) -> None:
        if metric.process_group is not None and id(metric) not in self._given:
            return
        metric.process_group = group
        if group is None:
            self._given.pop(id(metric), None)
        else:
            self._given[id(metric)] = metric


def make_whole(module: nn.Module) -> None:
    """Make what metrics keep of a step in the global view whole, which torchmetrics sends: predictions, say. Every rank must call it."""
    for _, outermost in outermost_metrics(module):
        for metric in _parts(outermost):
            for name in metric._defaults:
                value = getattr(metric, name)
                if isinstance(value, list):
                    value[:] = whole_of(value)  # the lists of a collection's metrics may be one
                else:
                    setattr(metric, name, whole_of(value))


def was_updated(metric: Metric | MetricCollection) -> bool:
    """Return whether a metric, or one of its parts, holds what a step has counted."""
    return any(each.update_called for each in _parts(metric))


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


def _parts(metric: Metric | MetricCollection) -> list[Metric]:
    return [each for each in metric.modules() if isinstance(each, Metric)]
