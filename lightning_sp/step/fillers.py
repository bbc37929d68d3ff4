"""Steps and hooks on a batch of fillers: they run, for other ranks' messages need them, and leave as little as can be behind.

evaluation       nothing stays: attributes, metrics, logs
training         its loss counts for nothing by itself; metrics are put back, those of means of one number a batch aside
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import product
from typing import Any

import torch
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.wrappers import Running

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.step.isolation.snapshot import isolated
from lightning_sp.trainer.hooks.batch_end_hooks import HOOKS as ENDS
from lightning_sp.trainer.hooks.batch_start_hooks import HOOKS as STARTS
from lightning_sp.trainer.hooks.replaced_hooks import ReplacedHooks, hooks_of_user
from lightning_sp.trainer.logged_numbers.row_metrics import outermost_metrics, parts_of
from lightning_sp.trainer.loops import without_loggers


@contextmanager
def leaving_nothing(module: Any, device: torch.device) -> Iterator[None]:
    """Run a step or a hook of an evaluation on fillers; what it logs takes part in other ranks' messages (`FillerLogs`)."""
    lists, windows = _lists_in_parts([module]), _windows([module])
    with isolated(module, device, logs=True), without_loggers(module.trainer):
        yield
        added, counted, moved = _added(lists), _counted([module]), _moved(windows)
    _keep_company(added)
    _count_as_others(counted, moved)
    forget_computed([module])


class FillerHooks:
    """Users' hooks around a batch of an evaluation, and its step, between them; a class because what they are is put back.

    What one of them leaves on fillers the next ones find, and behind the last one it is put back: a hook notes what the step reads.

    Args:
        batch: gives the batch in progress.
        device: of the run.
        behind: is called when all was put back.
    """

    def __init__(
        self,
        batch: Callable[[], SequenceInfo | None],
        device: Callable[[], torch.device],
        behind: Callable[[], None] = lambda: None,
    ) -> None:
        self._batch, self._device, self._behind = batch, device, behind
        self._replaced = ReplacedHooks()
        self._apart = ExitStack()
        self._is_apart = False

    def follow(self, trainer: Any) -> None:
        """Let the hooks of a trainer's callbacks and module leave nothing of a batch of fillers until `release`."""
        self.release()
        module = trainer.lightning_module
        names = [each for each in (*STARTS, *ENDS) if "train" not in each]
        last = [(module, each, 0) for each in ENDS if each in names]  # called behind all others, overridden or not
        found = {(id(owner), hook): (owner, hook) for owner, hook, _ in (*hooks_of_user(trainer, names), *last)}
        for owner, hook in found.values():
            ends = owner is module and hook in ENDS
            self._replaced.replace(owner, hook, self._run(getattr(owner, hook), module, ends=ends))

    def release(self) -> None:
        """Give every owner its own hook back."""
        self._is_apart = False
        self._apart.close()
        self._replaced.release()

    def begin(self, module: Any) -> None:
        """Run what comes apart, where the batch is one of fillers, until `end`."""
        info = self._batch()
        if info is not None and info.is_filler and not self._is_apart:
            self._is_apart = True
            self._apart.enter_context(leaving_nothing(module, self._device()))

    def end(self) -> None:
        """Put back what was done to a batch of fillers."""
        was_apart, self._is_apart = self._is_apart, False
        self._apart.close()
        if was_apart:
            self._behind()

    def _run(self, own: Callable[..., Any], module: Any, *, ends: bool) -> Callable[..., Any]:
        @wraps(own)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.begin(module)
            found = own(*args, **kwargs)
            if (info := self._batch()) is not None and info.has_fillers:
                forget_computed([module])
            if ends:
                self.end()
            return found

        return run


def forget_computed(holders: Iterable[Any]) -> None:
    """Let metrics compute anew: what they have computed beside a filler, over all ranks, counts it."""
    for holder in holders:
        for _, found in outermost_metrics(holder):
            for metric in parts_of(found):
                metric._computed = None


@contextmanager
def metrics_put_back(holders: Iterable[Any], *, trains: bool) -> Iterator[None]:
    """Run a step on fillers, and put back the metrics that count rows: another rank counts these. Of an evaluation all are put back.

    In training a `MeanMetric` that is given one number and no weight keeps it: on one device each batch counts once, whatever its rows, and so
    it does on each rank.

    Args:
        holders: the module and callbacks, which hold the metrics.
        trains: whether the step is one of training.
    """
    found = [each for holder in holders for _, metric in outermost_metrics(holder) for each in _apart_of(metric)]
    put = [(metric, metric.update_called, _held_by(metric)) for metric in found]
    counting = set[int]()  # by identity: a metric's hash follows what it holds
    leaves = [each for metric in found for each in parts_of(metric) if len(parts_of(each)) == 1]
    own, lists, windows = [each.update for each in leaves], _lists_in_parts(holders), _windows(holders)
    for each in leaves:
        vars(each)["update"] = _noting(each, counting)
    try:
        yield
    finally:
        for each, update in zip(leaves, own, strict=True):
            vars(each)["update"] = update
    added, counted, moved = _added(lists), _counted(holders), _moved(windows)
    _count_groups(holders, counting)
    for metric, held, held_before in put:
        was_reset = held and not metric.update_called
        if was_reset or not trains or not counting.isdisjoint(map(id, parts_of(metric))):
            for each, name, value in held_before:
                vars(each)[name] = value
            own_parts = {id(part) for part in parts_of(metric)}  # metrics have an == of their own
            _keep_company([each for each in added if id(each[0]) in own_parts])
        if was_reset:
            metric.reset()
    _count_as_others(counted, moved)


def _count_groups(holders: Iterable[Any], counting: set[int]) -> None:
    """Add what the metrics of a collection count by another one's update, whose numbers they share."""
    for each in (metric for holder in holders for _, metric in outermost_metrics(holder)):
        for names in each._groups.values() if isinstance(each, MetricCollection) else ():
            parts = [id(part) for name in names for part in parts_of(each._modules[name])]
            if not counting.isdisjoint(parts):
                counting.update(parts)


def _counted(holders: Iterable[Any]) -> list[tuple[Metric, Any]]:
    """Return the metrics that hold what some step has counted, and what adds each up over ranks."""
    found = (part for holder in holders for _, metric in outermost_metrics(holder) for part in parts_of(metric))
    return [(each, each.dist_sync_fn) for each in found if each.update_called]


def _windows(holders: Iterable[Any]) -> list[tuple[Running, int]]:
    """Return the metrics of the last few steps, and how many steps each has seen."""
    found = (part for holder in holders for _, metric in outermost_metrics(holder) for part in parts_of(metric))
    return [(each, each._num_vals_seen) for each in found if isinstance(each, Running)]


def _moved(windows: list[tuple[Running, int]]) -> list[tuple[Running, int, int]]:
    return [(each, before, each._num_vals_seen) for each, before in windows if each._num_vals_seen > before]


def _count_as_others(counted: list[tuple[Metric, Any]], moved: list[tuple[Running, int, int]]) -> None:
    """Let metrics be as those of ranks with samples, but for what they hold: updated, and windows as many steps further, which are empty.

    Whether one was updated decides over which ranks it adds up, at a run's end too: it keeps those of its first update.
    """
    for metric, gather in counted:
        if not metric.update_called:
            metric._update_count, metric.dist_sync_fn = 1, gather
    for window, before, after in moved:
        if window._num_vals_seen == before:  # put back
            window._num_vals_seen = after
            for step, name in product(range(before, after), window.base_metric._defaults):
                place = f"{name}_{step % window.window}"
                vars(window)[place] = _default(window._defaults[place])


def _default(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else list(value)


def _lists_in_parts(holders: Iterable[Any]) -> list[tuple[Metric, str, int]]:
    """Return the lists that torchmetrics gathers one element after the other, and how many each has: those of a retrieval, of boxes."""
    found = (part for holder in holders for _, metric in outermost_metrics(holder) for part in parts_of(metric))
    return [
        (each, name, len(getattr(each, name)))
        for each in found
        for name, reduce in each._reductions.items()
        if reduce is None and isinstance(getattr(each, name), list)
    ]


def _added(lists: list[tuple[Metric, str, int]]) -> list[tuple[Metric, str, list[Any]]]:
    """Return empty tensors like those that a step has added to lists."""
    news = ((each, name, getattr(each, name)[count:]) for each, name, count in lists)
    return [
        (each, name, [v.new_empty((0, *v.shape[1:])) for v in values if isinstance(v, torch.Tensor)])
        for each, name, values in news
        if values
    ]


def _keep_company(added: list[tuple[Metric, str, list[Any]]]) -> None:
    """Let lists have as many elements as those of ranks with samples, which send theirs one by one: empty ones, for fillers."""
    for each, name, values in added:
        vars(each)[name] = [*getattr(each, name), *values]


def _held_by(metric: Metric) -> list[tuple[Metric, str, Any]]:
    """Return what a metric and its parts have counted: their states, and counts beside them. Dtypes and devices follow the run."""
    found: list[tuple[Metric, str, Any]] = []
    for each in parts_of(metric):
        for name, value in vars(each).items():
            if name in each._defaults:
                found.append((each, name, value.clone() if isinstance(value, torch.Tensor) else list(value)))
            elif type(value) in (int, float, bool):
                found.append((each, name, value))
    return found


def _apart_of(metric: Metric | MetricCollection) -> list[Metric]:
    """Return the metrics of a collection, or the one metric: each keeps or forgets what it has counted by itself."""
    return list(metric.values(copy_state=False)) if isinstance(metric, MetricCollection) else [metric]


def _noting(metric: Metric, counting: set[int]) -> Callable[..., Any]:
    own = metric.update

    def update(*args: Any, **kwargs: Any) -> Any:
        numbers = [*args, *kwargs.values()]
        if not isinstance(metric, MeanMetric) or len(numbers) != 1 or torch.as_tensor(numbers[0]).dim():
            counting.add(id(metric))
        return own(*args, **kwargs)

    return update
