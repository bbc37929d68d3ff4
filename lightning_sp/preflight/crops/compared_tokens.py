"""A crop in which the numbers occur that a step compares its tokens with: a step does nothing with those that its first batches lack.

after = (ids == EOS).cumsum(1) > 0      zeros on every part, until a row holds EOS: then each part counts its own
same = ids[:, 1:] == ids[:, :-1]        likewise, until two neighbours are alike
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lightning_sp.preflight.recording.compared import Compared

# Entries that say how others are to be read: what they hold is no matter of chance.
_OF_STRUCTURE = ("mask", "position_ids", "cu_seqlens")
# Of an odd row's tokens one in so many is each of the numbers; that often it is shown already. And numbers that are shown at once.
_ONE_IN, _OFTEN, _MOST = 12, 4, 16
# Crops that are tried where the first one fails: with one of the numbers each.
_SINGLE = 3


def with_compared(
    entries: Mapping[str, Tensor], compared: Mapping[str, Compared], rows: int, piece: int
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield tokens with what they are compared with among them, and that in words; with all of it, then with one number each.

    Args:
        entries: of a crop, that carry the sequence along dim 1.
        compared: what the step has compared, by the entry's name.
        rows: of the crop.
        piece: tokens of which a rank has each whole.
    """
    shown: list[tuple[str, Compared]] = []
    for name, found in sorted(compared.items()):
        if name in entries and _is_of_tokens(name, entries[name]):
            rare = {each for each in found.numbers if each >= 0 and _count(entries[name], each) < _OFTEN * rows}
            if rare or found.neighbours:
                shown.append((name, found._replace(numbers=frozenset(sorted(rare)[:_MOST]))))
    single = [(name, Compared(frozenset({each}))) for name, found in shown for each in sorted(found.numbers)]
    for chosen in ([shown] if shown else []) + ([[each] for each in single[:_SINGLE]] if len(single) > 1 else []):
        values = {name: _with_numbers(entries[name], found, piece) for name, found in chosen}
        yield " and ".join(_in_words(*each) for each in chosen), values


def _is_of_tokens(name: str, value: Tensor) -> bool:
    return value.dim() == 2 and value.dtype in (torch.int64, torch.int32) and not name.endswith(_OF_STRUCTURE)


def _count(value: Tensor, number: int) -> int:
    return int((value == number).sum())


def _with_numbers(value: Tensor, found: Compared, piece: int) -> Tensor:
    """Return tokens with the numbers at places that are the same on all ranks. Shapes: (B, S) -> (B, S).

    Even rows have them at the end of the first rank's first piece alone: what looks for one in a row, or at the token before, finds another
    thing in each part. Odd rows have them anywhere. In a row whose tokens are all alike others come one after the other.
    """
    value, numbers = value.clone(), sorted(found.numbers)
    if found.neighbours:
        value[::2, piece:] = torch.where(
            _every(piece, value[::2, piece:]), value[::2, piece - 1 : -1], value[::2, piece:]
        )
        value[1::2, 1:] = torch.where(_drawn(value[1::2, 1:], 0), value[1::2, :-1], value[1::2, 1:])
        alike = (value[:, 1:] == value[:, :-1]).all(1, keepdim=True)
        value += alike * torch.stack([_drawn(value[0], row).cumsum(0) for row in range(len(value))])
    for place, number in enumerate(numbers):
        value[::2, range(piece - 1 - place, piece // 2 - 1, -len(numbers))] = number
        anywhere = _drawn(value[1::2], 1 + place)
        anywhere[:, place % piece :: piece] = True  # in each piece
        value[1::2] = value[1::2].masked_fill(anywhere, number)
    return value


def _every(piece: int, value: Tensor) -> Tensor:
    return torch.arange(value.shape[1], device=value.device) % piece == 0


def _drawn(value: Tensor, seed: int) -> Tensor:
    drawn = torch.rand(value.shape, generator=torch.Generator().manual_seed(seed)) * _ONE_IN
    return (drawn < 1).to(value.device)


def _in_words(name: str, found: Compared) -> str:
    numbers = ", ".join(map(str, sorted(found.numbers)))
    return " and ".join(filter(None, [numbers, "equal neighbours" if found.neighbours else ""])) + f" in {name}"
