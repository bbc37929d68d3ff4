"""Numbers of the user's own that count batches. A trial shows them as later in the run, as it does the run's own progress.

self.seen += 1
if self.seen > 1_000: labels[:, : self.skipped] = -100      a trial of the first batches does not see this line
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning_sp.step.isolation import OF_THE_FRAMEWORK, is_class_of_user
from lightning_sp.trainer.hooks.batch_hooks import of_user

NUMBERS = (bool, int, float, str, type(None))
_NOT_THE_USERS = {*OF_THE_FRAMEWORK, "_current_fx_name"}


class Counter(NamedTuple):
    """A whole number in an attribute that each batch of training adds to.

    Args:
        owner: a module or callback.
        name: of the attribute.
        each: what a batch adds.
    """

    owner: Any
    name: str
    each: int


def owners_of_numbers(trainer: Any) -> list[Any]:
    """Return the modules and callbacks of a run whose classes are the user's own."""
    owners = [*trainer.lightning_module.modules(), *of_user(trainer)]
    # FSDP2 gives a module a class of its own, behind which the user's stands.
    return [each for each in owners if any(map(is_class_of_user, type(each).__mro__))]


def numbers_of(owner: Any) -> dict[str, Any]:
    """Return an object's attributes that are plain numbers, texts or None, and the user's."""
    return {name: value for name, value in vars(owner).items() if type(value) in NUMBERS and name not in _NOT_THE_USERS}


def noting_counters(run: Callable[[], Any], trainer: Any, found: list[Counter]) -> Callable[[], Any]:
    """Return a step that notes which numbers it counts up: it is run on one batch.

    Args:
        run: the step.
        trainer: of the run.
        found: takes them.
    """

    def noted() -> Any:
        owners = owners_of_numbers(trainer)
        before = [numbers_of(each) for each in owners]
        output = run()
        for owner, numbers in zip(owners, before, strict=True):
            found.extend(_counted(owner, numbers))
        return output

    return noted


def _counted(owner: Any, before: dict[str, Any]) -> Iterator[Counter]:
    for name, value in numbers_of(owner).items():
        if type(value) is int and type(before.get(name)) is int and value != before[name]:
            yield Counter(owner, name, value - before[name])


@contextmanager
def counted_on(counters: Sequence[Counter], batches: int) -> Iterator[str]:
    """Show counters as so many batches later, and put them back.

    Yields:
        What they show, in words; empty without counters.
    """
    before = [getattr(each.owner, each.name) for each in counters]
    try:
        for counter, value in zip(counters, before, strict=True):
            setattr(counter.owner, counter.name, value + batches * counter.each)
        yield ", ".join(f"{each.name}={getattr(each.owner, each.name):,}" for each in counters)
    finally:
        for counter, value in zip(counters, before, strict=True):
            setattr(counter.owner, counter.name, value)
