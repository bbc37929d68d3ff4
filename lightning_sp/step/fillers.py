"""Steps and hooks on a batch of fillers: they run, for other ranks' messages need them, and leave as little as can be behind.

evaluation       nothing stays: attributes, metrics, logs
training         its loss counts for nothing by itself; metrics are put back, those of means of one number a batch aside
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torchmetrics import MeanMetric, Metric

from lightning_sp.step.isolation.snapshot import isolated, snapshot
from lightning_sp.trainer.hooks.batch_end_hooks import HOOKS as ENDS
from lightning_sp.trainer.hooks.batch_start_hooks import HOOKS as STARTS
from lightning_sp.trainer.hooks.replaced_hooks import ReplacedHooks, hooks_of_user
from lightning_sp.trainer.logged_numbers.row_metrics import outermost_metrics, parts_of
from lightning_sp.trainer.loops import without_loggers


@contextmanager
def leaving_nothing(module: Any, device: torch.device) -> Iterator[None]:
    """Run a step or a hook of an evaluation on fillers; what it logs takes part in other ranks' messages (`FillerLogs`)."""
    with isolated(module, device, logs=True), without_loggers(module.trainer):
        yield
    forget_computed([module])


class FillerHooks:
    """Users' hooks around a batch of an evaluation; a class because what they are is put back.

    Args:
        fillers: tells whether the batch in progress is one of fillers.
        device: of the run.
    """

    def __init__(self, fillers: Callable[[], bool], device: Callable[[], torch.device]) -> None:
        self._fillers, self._device = fillers, device
        self._replaced = ReplacedHooks()

    def follow(self, trainer: Any) -> None:
        """Let the hooks of a trainer's callbacks and module leave nothing of a batch of fillers until `release`."""
        self.release()
        module = trainer.lightning_module
        for owner, hook, _ in hooks_of_user(trainer, [each for each in (*STARTS, *ENDS) if "train" not in each]):
            self._replaced.replace(owner, hook, self._apart(getattr(owner, hook), module))

    def release(self) -> None:
        """Give every owner its own hook back."""
        self._replaced.release()

    def _apart(self, own: Callable[..., Any], module: Any) -> Callable[..., Any]:
        @wraps(own)
        def run(*args: Any, **kwargs: Any) -> Any:
            with leaving_nothing(module, self._device()) if self._fillers() else nullcontext():
                return own(*args, **kwargs)

        return run


def forget_computed(holders: Iterable[Any]) -> None:
    """Let metrics compute anew: what they have computed beside a filler, over all ranks, counts it."""
    for holder in holders:
        for _, found in outermost_metrics(holder):
            for metric in parts_of(found):
                metric._computed = None


@contextmanager
def metrics_put_back(holders: Iterable[Any]) -> Iterator[None]:
    """Run a training step on fillers, and put back the metrics that count rows: another rank counts these.

    A `MeanMetric` that is given one number and no weight keeps it: on one device each batch counts once, whatever its rows, and so it does on
    each rank.

    Args:
        holders: the module and callbacks, which hold the metrics.
    """
    found = [metric for holder in holders for _, metric in outermost_metrics(holder)]
    put = [(metric, snapshot(metric)) for metric in found]
    counting = set[int]()  # by identity: a metric's hash follows what it holds
    leaves = [each for metric in found for each in parts_of(metric) if len(parts_of(each)) == 1]
    own = [each.update for each in leaves]
    for each in leaves:
        vars(each)["update"] = _noting(each, counting)
    try:
        yield
    finally:
        for each, update in zip(leaves, own, strict=True):
            vars(each)["update"] = update
    for metric, restore in put:
        if not counting.isdisjoint(map(id, parts_of(metric))):
            restore()


def _noting(metric: Metric, counting: set[int]) -> Callable[..., Any]:
    own = metric.update

    def update(*args: Any, **kwargs: Any) -> Any:
        numbers = [*args, *kwargs.values()]
        if not isinstance(metric, MeanMetric) or len(numbers) != 1 or torch.as_tensor(numbers[0]).dim():
            counting.add(id(metric))
        return own(*args, **kwargs)

    return update
