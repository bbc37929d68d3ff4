"""Masks that are whole, known again as the bands and padded keys that they are made of: the operator takes those without a matrix.

    query i sees key j      i - before <= j <= i + after      and       keys[j]

Nothing of S x S is made here: a mask is read some rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.global_view.masks.known_numbers import read

# A number this low that is added hides a key in each dtype, whatever its score is.
ADDED_HIDES_BELOW = -1e9
_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Band:
    """Which keys a query sees.

    Args:
        before: how many tokens before its own; None for all.
        after: how many behind its own; None for all.
        keys: of each row those that may be seen, (B, 1, 1, T); None for all.
    """

    before: int | None
    after: int | None
    keys: Tensor | None = None

    @property
    def window(self) -> tuple[int | None, int | None]:
        """As `AttentionMask.window_size` has it; what is causal has no window behind."""
        return self.before, None if self.after == 0 else self.after


def band_of(mask: Tensor | None) -> Band | None:
    """Return the band that a mask is, None where it is another.

    Args:
        mask: bool, True if visible; or floating, 0 if visible, and a number that hides. (B or 1, 1, S, S).
    """
    if mask is not None and comm.is_traced(mask):
        return read(mask, band_of)
    if mask is None or mask.dim() < 2 or mask.requires_grad or mask.shape[-2] != mask.shape[-1] or mask.shape[-1] == 1:
        return None
    if any(size != 1 for size in mask.shape[1:-2]) or mask.dim() > 4:
        return None
    rows = mask.reshape(-1, *mask.shape[-2:])
    band = _window_of(rows[0]) if len(rows) == 1 else None
    if band is not None and _is_of(rows, band):
        return band
    if mask.is_floating_point():
        return None
    causal = Band(before=None, after=0, keys=rows.diagonal(dim1=-2, dim2=-1)[:, None, None])
    return causal if _is_of(rows, causal) else None


def _visible(part: Tensor) -> Tensor | None:
    """Return which keys a part of a mask shows; None where it adds another number."""
    if not part.is_floating_point():
        return part.bool()
    visible = part == 0
    return visible if bool((visible | (part <= ADDED_HIDES_BELOW)).all()) else None


def _window_of(mask: Tensor) -> Band | None:
    """Return the band that the first and the last row are of."""
    first, last = _visible(mask[0]), _visible(mask[-1])
    if first is None or last is None or not bool(first[0]) or not bool(last[-1]):
        return None
    end = len(first) - 1
    after, start = int(first.nonzero()[-1]), int(last.nonzero()[0])
    return Band(before=None if start == 0 else end - start, after=None if after == end else after)


def _is_of(rows: Tensor, band: Band) -> bool:
    """Return whether masks (B, S, S) are a band."""
    places = torch.arange(rows.shape[-1], device=rows.device)
    for first in range(0, len(places), _ROWS):
        found = _visible(rows[:, first : first + _ROWS])
        distance = places - places[first : first + _ROWS, None]
        wanted = torch.ones_like(distance, dtype=torch.bool)
        if band.before is not None:
            wanted &= distance >= -band.before
        if band.after is not None:
            wanted &= distance <= band.after
        expected = wanted[None] if band.keys is None else wanted & band.keys[:, 0]
        if found is None or not bool((found == expected).all()):
            return False
    return True
