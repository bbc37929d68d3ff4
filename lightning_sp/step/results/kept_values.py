"""What a step leaves in lists and dicts of the LightningModule for a hook at the epoch's end: found, and made whole as predictions are.

    self.outputs.append((logits.argmax(-1), batch["labels"]))      in validation_step; read in on_validation_epoch_end

An attribute that is one tensor is no such place: a cache of the step's own is one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_sp.errors import SequenceParallelError
from lightning_sp.users_code.ownership import OF_THE_FRAMEWORK

# Lists and dicts within one are looked into where it holds no more: one for each loader, or for each kind of output.
MAX_NESTED = 100


class _Place(NamedTuple):
    """Where a value is kept, and the attribute and the keys that lead there."""

    container: Any
    key: Any
    path: tuple[Any, ...]


class KeptValues:
    """Lists and dicts in attributes of a module as they were; a class because a step comes between.

    Args:
        module: the user's LightningModule. What its layers hold is their own.
        trains: whether the step is one of training, whose hooks write features to dicts and attributes that the next step writes to again:
            what is put into lists, without a history, is kept.
    """

    def __init__(self, module: nn.Module, *, trains: bool = False) -> None:
        self._module, self._trains = module, trains
        self._held = [each for _, each in _containers(module)]  # while they are held, no other object has their number
        self._before = {id(each): _content(each) for each in self._held}

    def new(self) -> dict[tuple[Any, ...], Any]:
        """Return what has been added since, by the attribute and the keys that lead to it."""
        return {place.path: place.container[place.key] for place in self._places()}

    def replace(self, change: Callable[[dict[tuple[Any, ...], Any]], Mapping[tuple[Any, ...], Any]]) -> None:
        """Put other values in the places of those that were added.

        Args:
            change: gives one for each.
        """
        places, changed = self._places(), change(self.new())
        for place in places:
            value = changed[place.path]
            place.container[place.key] = _within(place.container[place.key], value) if self._trains else value

    def replace_or_leave(self, change: Callable[[dict[tuple[Any, ...], Any]], Mapping[tuple[Any, ...], Any]]) -> bool:
        """Do the same; where `change` refuses a value, say so, leave them all, and return False."""
        try:
            self.replace(change)
        except SequenceParallelError as error:
            rank_zero_warn(f"{error}. From here on what training_step keeps is of each rank's own tokens")
            return False
        return True

    def _places(self) -> list[_Place]:
        attributes = vars(self._module)
        own = [
            n for n, value in _own_attributes(self._module) if id(value) not in self._before and _is_container(value)
        ]
        places = [_Place(attributes, name, (name,)) for name in own]
        for path, each in _containers(self._module):
            if id(each) in self._before:
                places += [_Place(each, key, (*path, key)) for key in _added(each, self._before[id(each)])]
        return [each for each in places if not self._trains or _is_put_away(each)]


def _is_put_away(place: _Place) -> bool:
    if not isinstance(place.container, (list, deque)):
        return False
    tensors = [each for each in tree_leaves(place.container[place.key]) if isinstance(each, Tensor)]
    return any(each.dim() > 1 for each in tensors) and not any(each.requires_grad for each in tensors)


def _own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((n, value) for n, value in vars(module).items() if n not in OF_THE_FRAMEWORK and n != "_buffers")


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, deque, dict))


def _containers(module: nn.Module) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the lists and dicts that attributes hold, and those that they hold, each once, with the keys that lead there."""
    waiting: list[tuple[tuple[Any, ...], Any]] = [((name,), value) for name, value in _own_attributes(module)]
    seen: set[int] = set()
    while waiting:
        path, value = waiting.pop(0)
        if not _is_container(value) or id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        if len(value) <= MAX_NESTED:
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [((*path, key), each) for key, each in parts]


def _content(container: Any) -> Any:
    """Return what tells later what was added."""
    return dict(container) if isinstance(container, dict) else list(container)


def _added(container: Any, before: Any) -> Iterator[Any]:
    """Yield the keys of values that were not there: behind those that were, or anywhere in a list that was emptied or has a most length."""
    if isinstance(container, dict):
        yield from (k for k, v in container.items() if k not in before or before[k] is not v)
        return
    num = len(before)
    if len(container) >= num and (not num or (container[0] is before[0] and container[num - 1] is before[-1])):
        yield from range(num, len(container))
        return
    old = {id(each) for each in before}
    yield from (index for index, each in enumerate(container) if id(each) not in old)


def _within(old: Any, new: Any) -> Any:
    """Return what takes a value's place: a list itself with the new values, for a backward may add to it."""
    if type(old) is not list or not isinstance(new, list) or len(old) != len(new):
        return new
    old[:] = [_within(*pair) for pair in zip(old, new, strict=True)]
    return old
