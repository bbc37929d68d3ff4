"""What a step compares the tokens of its batch with: numbers (`ids == EOS`), or others of the same entry (`ids[:, 1:] == ids[:, :-1]`)."""

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


class Compared(NamedTuple):
    """What tokens of an entry are compared with.

    Args:
        numbers: integers.
        neighbours: whether they are compared with others of the entry.
    """

    numbers: frozenset[int] = frozenset()
    neighbours: bool = False


def note_compared(
    function: str, tensors: Sequence[Tensor], others: Sequence[Any], leaves: Any, found: MutableMapping[Entry, Compared]
) -> None:
    """Note what integers of one tensor of the batch are compared with, as they are or moved.

    Args:
        function: of torch, by its name.
        tensors: that it is given.
        others: what else.
        leaves: the tensors of the batch that a tensor was made of, by tensor.
        found: to add to.
    """
    of_batch = [each for each in tensors if each in leaves]
    entries = {entry for each in of_batch for entry in leaves[each]}
    is_of_integers = not any(each.is_floating_point() or each.dtype == torch.bool for each in of_batch)
    if function not in _TOLD_APART or len(entries) != 1 or not is_of_integers:
        return
    numbers = frozenset(
        number for each in (*others, *(each for each in tensors if each not in leaves)) for number in _integers(each)
    )
    (entry,) = entries
    before = found.get(entry, Compared())
    found[entry] = Compared(before.numbers | numbers, before.neighbours or len(of_batch) > 1)


def _integers(value: Any) -> Iterator[int]:
    """Return the integers that something is compared with, where these are few."""
    if isinstance(value, Tensor):
        known = not (value.is_floating_point() or value.dtype == torch.bool or value.numel() > _FEW)
        yield from value.flatten().tolist() if known and not torch._C._functorch.is_batchedtensor(value) else ()
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
