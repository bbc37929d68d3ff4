"""Numbers of the user's own that stay as they are for some batches and then change: an epoch, a mask's length, a phase that a callback sets.

    if self.current_epoch >= 5: labels[:, : self.skipped] = -100      no operation of the loss is new, and no step before did it
    if batch["task"] == "reversed": ids = ids.flip(1)                 nor here

So do modules that a hook changes, a batch norm that is to train from now on, a hook or a forward put in another's place; and a batch of other
entries, or of a task that none before had. A trial of the step in which they change shows what the others could not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_sp.batch_structure import entries_of
from lightning_sp.step.users_numbers.counters import (
    Counter,
    added,
    numbers_of,
    owners_of_numbers,
    room_in_queues,
    shown_as,
)
from lightning_sp.step.users_numbers.results import NumbersOfHooks, Result, became_result, numbers_and_lists_of
from lightning_sp.users_code.ownership import is_file_of_user

# Of so many batches: what changes with each is a counter.
_STAYS = 2
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Owners that are none of the user's, by negative numbers.
_RUN, _MODULES, _BATCH, _RATES = -1, -2, -3, -4
# The first changes are each told; then the 8th, the 16th, the 32nd, and so on.
_EACH = 4
# Of an entry that says which task a batch has, and of a flag or text of the user's, so many values are each told: one that has more counts or
# names samples. Of flags and texts together so many in a fit.
MOST_TASKS, _MOST_NEW = 4, 8


class _Added(NamedTuple):
    """What was added to a number, how often it was as much, before which batch at last, and so many batches after the time before."""

    each: float = 0
    times: int = 0
    last: int = 0
    batches: int = 1

    @property
    def of_batch(self) -> float:
        return self.each if self.batches == 1 else self.each / self.batches


class Schedules:
    """What is known of such numbers in a fit; a class because it waits for their change."""

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._batches, self._batch = 0, None
        self._last: dict[int, dict[Any, Any]] = {}  # of each owner
        self._before: dict[int, dict[Any, Any]] = {}  # as the last one was before its step
        self._since: dict[tuple[int, Any], int] = {}  # the batch before which a number became what it is
        self._added: dict[tuple[int, Any], _Added] = {}
        self._told: set[tuple[int, Any]] = set()
        self._tasks: dict[str, set[Any]] = {}  # values of the entries of batches so far
        self._kinds: dict[tuple[int, Any], set[Any]] = {}  # of each number, flag and text
        self._changes, self._new = 0, 0
        self._first: dict[int, dict[Any, Any]] | None = None  # of each owner, before the first step
        self._lines: set[str] = set()

    def start(self, trainer: Any) -> None:
        """Begin a fit."""
        self._owners = owners_of_numbers(trainer)
        self._batches, self._batch, self._last, self._before, self._since = 0, None, {}, {}, {}
        self._added, self._told, self._tasks, self._kinds, self._changes, self._new = {}, set(), {}, {}, 0, 0
        self._first, self._lines = None, set()

    def have_changed(self, trainer: Any, batch: Any) -> bool:
        """Return whether one has before this training batch, and is to be told; once for a batch, which may be handed over twice."""
        if not trainer.training or not self._owners or batch is self._batch:
            return False
        self._batches, self._batch, self._before = self._batches + 1, batch, dict(self._last)
        # What each optimizer step adds to is a counter, too.
        stays = _STAYS * trainer.accumulate_grad_batches
        changed, is_new = self._has_new_task(batch), False
        for index, numbers in (*self._read(trainer), (_BATCH, structure_of(batch))):
            before, self._last[index] = self._last.get(index, {}), numbers
            if before == numbers:
                continue
            for name, value in numbers.items():
                if name not in before:
                    self._since[index, name] = self._batches
                    self._is_new_kind(index, name, value)
                elif self._is_other(value, before[name]):
                    changed |= self._batches - self._since[index, name] >= stays
                    is_new |= self._is_new_kind(index, name, value)
                    self._since[index, name] = self._batches
                    self._note_added((index, name), before[name], value)
        return self._is_told(changed, is_new)

    def _is_new_kind(self, index: int, name: Any, value: Any) -> bool:
        """Return whether a flag or a text is one that it never was, or a number is of another type; such a change need not have stayed."""
        known = self._kinds.setdefault((index, name), set())
        kind = value if isinstance(value, (bool, str)) or index == _MODULES else type(value)
        is_new = self._batches > 1 and bool(known) and kind not in known and len(known) < MOST_TASKS
        if len(known) < MOST_TASKS:
            known.add(kind)
        return is_new

    def _has_new_task(self, batch: Any) -> bool:
        """Return whether an entry says what none before it has; the first batch is tried by itself."""
        found = False
        for name, value in tasks_of(batch).items():
            known = self._tasks.setdefault(name, set())
            found |= value not in known and len(known) < MOST_TASKS
            if len(known) < MOST_TASKS:
                known.add(value)
        return found and self._batches > 1

    def have_changed_in_hooks(self, trainer: Any) -> bool:
        """Return whether one has since the batch in progress was handed over, and is to be told: a hook at its start has set a phase."""
        stays = _STAYS * trainer.accumulate_grad_batches
        others = [
            (index, name, value)
            for index, numbers in self._read(trainer)
            for name, value in numbers.items()
            if self._is_other(value, self._last.get(index, {}).get(name, value))
        ]
        changed = [each[:2] for each in others if self._batches - self._since[each[:2]] >= stays]
        self._since |= dict.fromkeys(changed, self._batches)
        return self._is_told(bool(changed), any([self._is_new_kind(*each) for each in others]))

    @staticmethod
    def _is_other(value: Any, before: Any) -> bool:
        return value is not before and value == value and value != before

    def _is_told(self, changed: bool, is_new: bool) -> bool:
        self._changes += changed
        self._new += is_new
        is_due = changed and (self._changes <= _EACH or self._changes & (self._changes - 1) == 0)
        return is_due or (is_new and self._new <= _MOST_NEW)

    def take_numbers(self) -> NumbersOfHooks:
        """Return what the run has left of numbers so far: each of them once in a fit."""
        return NumbersOfHooks(self._take_counters(), self._take_results(), self._lines)

    def _take_results(self) -> list[Result]:
        """Return the results that were others when this was first asked for, before the first step."""
        now = {index: numbers_and_lists_of(owner) for index, owner in enumerate(self._owners)}
        if self._first is None:
            self._first = now
        found = [
            (index, name)
            for index, numbers in now.items()
            for name, value in numbers.items()
            if (index, name) not in self._told and became_result(self._first[index].get(name), value)
        ]
        self._told.update(found)
        return [Result(self._owners[index], name, now[index][name]) for index, name in found]

    def _take_counters(self) -> list[Counter]:
        """Return the numbers to which each of the last batches has added as much."""
        found = [
            key
            for key, (_, times, _, _) in self._added.items()
            if times >= _STAYS and key[0] >= 0 and key not in self._told
        ]
        self._told.update(found)
        room, owners = room_in_queues(self._owners), self._owners
        return [
            Counter(owners[key[0]], key[1], self._added[key].of_batch, room.get(id(owners[key[0]]))) for key in found
        ]

    def _note_added(self, key: tuple[int, Any], before: Any, value: Any) -> None:
        if added(before, value):
            each, times, last, _ = self._added.get(key, _Added())
            again = times + 1 if value - before == each else 1
            self._added[key] = _Added(value - before, again, self._batches, self._batches - last)

    @contextmanager
    def as_before_last_step(self) -> Iterator[None]:
        """Show the user's numbers as they were when the batch before was handed over, and put them back: what its step did depends on them."""
        with ExitStack() as undo:
            for index, numbers in self._before.items():
                for name, value in numbers.items() if index >= 0 else ():
                    undo.enter_context(shown_as(self._owners[index], name, value))
            yield

    def _read(self, trainer: Any) -> Iterator[tuple[int, dict[Any, Any]]]:
        yield _RUN, {"epoch": trainer.current_epoch}
        yield _RATES, dict(_rates(trainer))
        yield _MODULES, {"modules": tuple(map(_mode, trainer.lightning_module.modules()))}
        for index, owner in enumerate(self._owners):
            yield index, numbers_of(owner)


def _rates(trainer: Any) -> Iterator[tuple[Any, float]]:
    """Yield the learning rates of optimizers, which a hook may set: those that no device has."""
    for i, optimizer in enumerate(getattr(trainer, "optimizers", ())):
        for j, group in enumerate(optimizer.param_groups):
            if isinstance(rate := group.get("lr"), float):
                yield (i, j), rate


def _mode(module: nn.Module) -> tuple[Any, ...]:
    """Return by what a module's call may do other things than before, beside its numbers."""
    own = vars(module)
    functions = [own["forward"]] if "forward" in own else []
    for name in _HOOKS:
        functions += own[name].values()
    return id(module), module.training, *(id(each) for each in functions if _is_of_user(each))


def _is_of_user(function: Any) -> bool:
    """Return whether a function is no library's: this package's own come and go with the view, and with units."""
    while isinstance(function, partial):
        function = function.func
    return is_file_of_user(getattr(function, "__module__", None) or type(function).__module__)


def tasks_of(batch: Any) -> dict[str, Any]:
    """Return the entries that say one thing of all of a batch's rows: a text, a flag, a whole number, or as many alike as there are rows."""
    found = {}
    for name, each in (entries_of(batch) or {}).items():
        value = each
        if isinstance(each, Tensor):
            is_flag = each.device.type == "cpu" and each.dim() <= 1 and not each.is_floating_point() and each.numel()
            value = each.flatten()[0].item() if is_flag and bool((each == each.flatten()[0]).all()) else None
        elif isinstance(each, (list, tuple)):
            value = (
                each[0] if each and type(each[0]) in (str, bool, int) and all(one == each[0] for one in each) else None
            )
        if type(value) in (str, bool, int):
            found[name] = value
    return found


def structure_of(batch: Any) -> dict[str, Any]:
    """Return the names of a batch's entries, with the dtypes and dims of tensors, as one value."""
    entries = entries_of(batch) or {}
    kinds = {
        name: f"{each.dtype} of {each.dim()} dims" if isinstance(each, Tensor) else type(each).__name__
        for name, each in entries.items()
    }
    return {"entries": str(sorted(kinds.items()))}
