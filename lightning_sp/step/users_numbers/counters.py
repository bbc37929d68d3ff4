"""Numbers of the user's own that count batches. A trial shows them as later in the run, as it does the run's own progress.

    self.seen += 1
    if self.seen > 1_000: labels[:, : self.skipped] = -100      a trial of the first batches does not see this line

They are attributes of modules, callbacks and their classes, names in the files of these and in closures, or entries of dicts and of objects
that these hold; whole numbers, also as floats and tensors; places of short lists, and how many numbers a list has.
"""

from __future__ import annotations

import dis
import sys
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from queue import Queue
from types import CellType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_tensor
from torch.distributed.tensor import DTensor

from lightning_sp.trainer.hooks.batch_hooks import of_user
from lightning_sp.trainer.noted_remainders import NotedTensors, Remainder, noted_number
from lightning_sp.users_code.iterators import Count
from lightning_sp.users_code.kept_outside import NUMBERS, kept_outside
from lightning_sp.users_code.ownership import OF_THE_FRAMEWORK, is_class_of_user, is_object_of_user, plain_text

_NOT_THE_USERS = {*OF_THE_FRAMEWORK, "_current_fx_name"}
_PLAIN, _NOT_PLAIN = frozenset(NUMBERS), frozenset((dict, OrderedDict, list, set))
_LENGTH, _IN_CELL = "length", "cell_contents"
# Of longer lists no later length is made; so many objects of a run are looked into, and no longer dicts: a vocabulary is no state.
_LONGEST = 100_000
# A list of so few numbers is not one number for each batch: each place may be a count.
_MOST_PLACES = 4
_MOST_OWNERS, _MOST_ENTRIES = 10_000, 1_000


class Counter(NamedTuple):
    """A whole number that each batch of training adds to.

    Args:
        owner: a module, a callback, a class, an object or dict of theirs, or a list of numbers.
        name: of the attribute or entry.
        each: what a batch adds.
        most: what it does not go beyond; None where that is not known.
    """

    owner: Any
    name: Any
    each: float
    most: int | None = None


def owners_of_numbers(trainer: Any) -> list[Any]:
    """Return the modules and callbacks of a run that are of the user's classes, these and their files, and what all hold numbers in."""
    held = [*trainer.lightning_module.modules(), *of_user(trainer)]
    # FSDP2 gives a module a class of its own, behind which the user's stands.
    owners = [each for each in held if any(map(is_class_of_user, type(each).__mro__))]
    kinds = dict.fromkeys(kind for each in owners for kind in type(each).__mro__ if is_class_of_user(kind))
    files = [vars(sys.modules[name]) for name in {kind.__module__: 0 for kind in kinds} if name in sys.modules]
    owners += [kind for kind in {type(each): 0 for each in owners} if kind not in kinds] + files
    seen = {id(each) for each in (*held, *owners)}
    outside = kept_outside(held)
    waiting: list[Any] = [*kinds, *(value for each in owners for value in _values(each))]
    waiting += [value for each in outside for value in (each.cell, each.value) if value is not None]
    while waiting and len(owners) < _MOST_OWNERS:
        value = waiting.pop(0)
        if id(value) not in seen and _holds_numbers(value):
            seen.add(id(value))
            owners.append(value)
            waiting += [] if isinstance(value, (list, deque)) else _values(value)
        elif isinstance(value, partial):
            waiting += [*value.args, value.keywords]
    return owners


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, (list, deque)):
        return all(type(each) in (int, float, bool) for each in value)
    if isinstance(value, dict):
        return len(value) <= _MOST_ENTRIES
    if isinstance(value, type):
        return is_class_of_user(value)
    return isinstance(value, (SimpleNamespace, Namespace, CellType)) or is_object_of_user(value)


def _values(owner: Any) -> list[Any]:
    return [value for name, value in _named(owner).items() if name not in _NOT_THE_USERS]


def _named(owner: Any) -> dict[Any, Any]:
    """Return an object's attributes, a dict's entries, or what is in a closure's cell; names of Python's own aside."""
    named = _all_named(owner)
    is_object = not isinstance(owner, dict) or "__name__" in owner
    return {n: v for n, v in named.items() if not n.startswith("__")} if is_object else named


def _all_named(owner: Any) -> dict[Any, Any]:
    if isinstance(owner, CellType):
        try:
            return {_IN_CELL: owner.cell_contents}
        except ValueError:  # it has been emptied
            return {}
    return owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})


def numbers_of(owner: Any, *, on_device: bool = False) -> dict[Any, Any]:
    """Return what an owner holds of plain numbers, texts, None, and what is made of these.

    Args:
        owner: one of `owners_of_numbers`.
        on_device: of tensors on a device too, which waits for it.
    """
    if isinstance(owner, (list, deque)):
        places = enumerate(owner) if len(owner) <= _MOST_PLACES else ()
        # An empty one is taken for one of numbers; it may hold tensors later.
        return {_LENGTH: len(owner), **{place: each for place, each in places if type(each) in NUMBERS}}
    if isinstance(owner, Queue) or (isinstance(owner, dict) and len(owner) > _MOST_ENTRIES):
        return {}  # what a queue counts is what `join` waits for
    found = {}
    # Each batch does this for each module of the user's: what is plain needs no further question.
    for name, value in _all_named(owner).items():
        plain = value if type(value) in _PLAIN else _plain(value, on_device)
        # A name may be a weight, whose numbers are freed: it is not printed.
        if (
            plain is not NotImplemented
            and name not in _NOT_THE_USERS
            and not (type(name) is str and name.startswith("__"))
        ):
            found[name] = plain
    return found


def _plain(value: Any, on_device: bool) -> Any:
    """Return a value that can be compared; NotImplemented for one that cannot."""
    if type(value) in _NOT_PLAIN:
        return NotImplemented
    if isinstance(value, Enum):
        return value
    if type(value) is Count:
        return value.value
    if isinstance(value, tuple) and len(value) < 10 and all(type(each) in NUMBERS for each in value):
        return value
    if type(value) is Tensor and not isinstance(value, DTensor) and value.numel() == 1 and not value.requires_grad:
        known = value.device.type == "cpu" or (on_device and not value.is_meta)
        return value.item() if known else NotImplemented
    return NotImplemented


def room_in_queues(owners: Iterable[Any]) -> dict[int, int]:
    """Return how much the list or deque of a queue may hold, by its id: where more is in it, `put` waits for ever."""
    return {id(each.queue): each.maxsize for each in owners if isinstance(each, Queue) and each.maxsize > 0}


def noting_counters(run: Callable[[], Any], trainer: Any, found: list[Counter]) -> Callable[[], Any]:
    """Return a step that notes which numbers it counts up: it is run on one batch.

    Args:
        run: the step.
        trainer: of the run.
        found: takes them.
    """

    room: dict[int, int] = {}

    def note(owner: Any, before: dict[Any, Any], now: dict[Any, Any]) -> None:
        room.update(room_in_queues([owner]))
        for name, value in now.items():
            if name in before and added(before[name], value):
                found.append(Counter(owner, name, value - before[name], room.get(id(owner))))

    return noting_numbers(run, trainer, partial(numbers_of, on_device=True), note)


def noting_numbers(
    run: Callable[[], Any],
    trainer: Any,
    read: Callable[[Any], dict[Any, Any]],
    note: Callable[[Any, dict[Any, Any], dict[Any, Any]], None],
) -> Callable[[], Any]:
    """Return a step that looks at the user's numbers before and behind it: it is run on one batch.

    Args:
        run: the step.
        trainer: of the run.
        read: gives an owner's numbers, by name.
        note: is given each owner, and its numbers before and behind.
    """

    def noted() -> Any:
        owners = owners_of_numbers(trainer)
        before = [read(each) for each in owners]
        output = run()
        for owner, numbers in zip(owners, before, strict=True):
            note(owner, numbers, read(owner))
        return output

    return noted


def added(before: Any, value: Any) -> bool:
    """Return whether a number became another by a whole number, as a count does."""
    return (
        type(before) is type(value)
        and type(value) in (int, float)
        and value != before
        and float(value - before).is_integer()
    )


@contextmanager
def counted_on(counters: Sequence[Counter], batches: int, remainders: set[Remainder]) -> Iterator[str]:
    """Show counters as so many batches later, and put them back.

    Args:
        counters: to be shown.
        batches: how many.
        remainders: takes those that are taken of counters within.

    Yields:
        What they show, in words; empty without counters.
    """
    # A list may hold other things by now, and an entry be gone.
    counters = [each for each in counters if not isinstance(each.owner, (list, deque)) or _holds_numbers(each.owner)]
    counters = [each for each in counters if each.name in numbers_of(each.owner, on_device=True)]
    before = [numbers_of(each.owner, on_device=True)[each.name] for each in counters]
    lists = [(each.owner, list(each.owner)) for each in counters if isinstance(each.owner, (list, deque))]
    later = [_later(each, value, batches) for each, value in zip(counters, before, strict=True)]
    notes = [partial(_note, remainders, *each) for each in zip(counters, before, later, strict=True)]
    tensors = [(note, _held(each)) for each, note in zip(counters, notes, strict=True) if is_tensor(_held(each))]
    try:
        for counter, value, note in zip(counters, later, notes, strict=True):
            _show(counter, noted_number(value, note) if type(value) is int else value)
        with NotedTensors(tensors[0][0], [each for _, each in tensors]) if tensors else nullcontext():
            yield ", ".join(f"{plain_text(each.name)}={value:,}" for each, value in zip(counters, later, strict=True))
    finally:
        for counter, value in zip(counters, before, strict=True):
            if not isinstance(counter.owner, (list, deque)):
                _show(counter, value)
        for owner, values in lists:
            owner.clear()
            owner.extend(values)


def _note(
    remainders: set[Remainder], counter: Counter, now: Any, shown: Any, value: int, divisor: int, wanted: int | None
) -> None:
    """Note a remainder taken of a number that is made of a counter's, which is now one and shown as another."""
    offset, each = value - int(shown) + int(now), int(counter.each)
    remainders.add(Remainder("batches", offset % divisor, divisor, each % divisor, wanted))


@contextmanager
def shown_as(owner: Any, name: Any, value: Any) -> Iterator[None]:
    """Show one of `numbers_of` an owner as another, and put it back; one that is gone, or another list by now, stays as it is."""
    now = numbers_of(owner)
    if name not in now or now[name] == value or type(now[name]) is not type(value) or isinstance(owner, deque):
        yield
        return
    counter, held = Counter(owner, name, 0), list(owner) if isinstance(owner, list) else None
    try:
        if held is not None and name == _LENGTH:
            del owner[value:]
        else:
            _show(counter, value)
        yield
    finally:
        if held is not None:
            owner[:] = held
        else:
            _show(counter, now[name])


def _later(counter: Counter, value: Any, batches: int) -> Any:
    """Return what a counter shows so many batches later, of the same type."""
    found = type(value)(value + batches * counter.each)
    return found if counter.most is None else min(found, counter.most)


def _held(counter: Counter) -> Any:
    owner, name = counter.owner, counter.name
    return None if isinstance(owner, (list, deque)) else _named(owner)[name]


def _show(counter: Counter, value: Any) -> None:
    owner, name = counter.owner, counter.name
    if isinstance(owner, (list, deque)) and name != _LENGTH:
        owner[name] = value
    elif isinstance(owner, (list, deque)):
        owner.extend([owner[-1] if owner else 0.0] * (min(int(value), _LONGEST) - len(owner)))
    elif isinstance(held := _named(owner)[name], Tensor):
        with torch.no_grad():
            held.fill_(value)
    elif isinstance(held, Count):
        held.value = value
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def reads_batch_index(module: Any) -> bool:
    """Return whether training_step does something with the index of its batch, by its code."""
    own = (vars(kind).get("training_step") for kind in type(module).__mro__ if is_class_of_user(kind))
    code = getattr(next(filter(None, own), None), "__code__", None)
    if code is None or code.co_argcount < 3:
        return False
    name = code.co_varnames[2]
    read = [each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD")]
    return any(name == each or (isinstance(each, tuple) and name in each) for each in read)
