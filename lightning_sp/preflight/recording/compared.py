"""What a step compares the tokens of its batch with: numbers (`ids == EOS`), or others of the same entry (`ids[:, 1:] == ids[:, :-1]`).

And which of them it counts (`F.one_hot(ids, V).sum(1)[:, RARE]`), and which entries lines of the user's compute with.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Entry = tuple[Any, ...]  # keys and numbers that lead to a tensor of the batch

# Functions that tell some numbers from others, and as many of these as are noted.
_TOLD_APART, _FEW = (
    {"eq", "ne", "lt", "le", "gt", "ge", "not_equal", "greater", "less", "greater_equal", "less_equal", "isin"},
    16,
)
# Functions that give a number for each class, by how many classes there are; and those that take some of these.
_COUNTS, _TAKES = {"one_hot", "bincount"}, {"getitem", "select", "index_select", "gather", "narrow"}


class Compared(NamedTuple):
    """What tokens of an entry are compared with.

    Args:
        numbers: integers, or classes whose counts are taken.
        neighbours: whether they are compared with others of the entry.
        counted: whether they are counted by class.
        by_user: whether a line of the user's, and no library's, computes with them.
    """

    numbers: frozenset[int] = frozenset()
    neighbours: bool = False
    counted: bool = False
    by_user: bool = False


def note_compared(
    function: str,
    tensors: Sequence[Tensor],
    others: Sequence[Any],
    leaves: Any,
    found: MutableMapping[Entry, Compared],
    *,
    by_user: bool,
) -> None:
    """Note what integers of one tensor of the batch are compared with, as they are or moved.

    Args:
        function: of torch, by its name.
        tensors: that it is given.
        others: what else.
        leaves: the tensors of the batch that a tensor was made of, by tensor.
        found: to add to.
        by_user: whether a line of the user's calls it.
    """
    of_batch = [each for each in tensors if each in leaves]
    entries = {entry for each in of_batch for entry in leaves[each]}
    for each in entries if by_user else ():
        found[each] = found.get(each, Compared())._replace(by_user=True)
    if len(entries) != 1:
        return
    (entry,) = entries
    before = found.get(entry, Compared())
    is_of_integers = not any(each.is_floating_point() or each.dtype == torch.bool for each in of_batch)
    if function in _TOLD_APART and is_of_integers:
        with_others = (*others, *(each for each in tensors if each not in leaves))
        numbers = frozenset(number for each in with_others for number in _integers(each))
        found[entry] = before._replace(
            numbers=before.numbers | numbers, neighbours=before.neighbours or len(of_batch) > 1
        )
    elif function in _COUNTS:
        classes = max((number for each in others for number in _integers(each)), default=0)
        all_of_few = range(classes) if classes <= _FEW else ()
        found[entry] = before._replace(numbers=before.numbers | frozenset(all_of_few), counted=True)
    elif function in _TAKES and before.counted:
        taken = frozenset(number for each in _flat((*others, *tensors)) for number in _integers(each) if number >= 0)
        found[entry] = before._replace(numbers=before.numbers | taken)


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    """Yield what an index is made of, of a slice where it begins."""
    for each in values:
        if isinstance(each, (list, tuple)):
            yield from _flat(each)
        else:
            yield each.start if isinstance(each, slice) else each


def _integers(value: Any) -> Iterator[int]:
    """Return the integers that something is compared with, where these are few."""
    if isinstance(value, Tensor):
        known = not (value.is_floating_point() or value.dtype == torch.bool or value.numel() > _FEW)
        yield from value.flatten().tolist() if known and not torch._C._functorch.is_batchedtensor(value) else ()
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
