"""Padding of a batch: what its attention_mask hides, and what may be padded to a length that the degrees divide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sp.data.batch.contents.entries import STANDARD_NAMES
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout


class VisibleKeys(NamedTuple):
    """The keys that a padding mask leaves visible in each row: neither field is set where it hides none.

    Args:
        run: [start, stop) of each row, where the visible keys are a run, (B, 2), int64 on the CPU.
        each: whether each key is visible, where they are not, (B, S), bool.
    """

    run: Tensor | None = None
    each: Tensor | None = None


def read_visible_keys(mask: Tensor, dim: int, *, global_view: bool) -> VisibleKeys:
    """Return the keys that a padding mask leaves visible; nothing of several texts of a row, which a step in the global view reads itself.

    Shapes: (B, S) -> (B, 2) or (B, S).

    Args:
        mask: of a whole batch.
        dim: along which it carries the sequence.
        global_view: whether the step sees whole sequences.

    Raises:
        SequenceParallelError: the mask is not one of tokens.
    """
    if mask.dim() == 3 and dim == 2:
        if global_view:
            return VisibleKeys()
        raise SequenceParallelError(
            f"attention_mask of shape {tuple(mask.shape)} hides tokens of {mask.shape[1]} texts in each row; a rank's part carries one: the "
            "global view (global_view='auto' or True) carries them, or give each text a row in the collate function"
        )
    if mask.dim() != 2:
        raise SequenceParallelError(
            f"attention_mask of shape {tuple(mask.shape)}: must be (batch, tokens); a mask of queries and keys goes under another name, whole"
        )
    visible = mask.cpu() != 0
    if bool(visible.all()):
        return VisibleKeys()
    counts = visible.sum(1)
    start = visible.long().argmax(1)
    run = torch.stack([start, start + counts], 1)
    tokens = torch.arange(mask.shape[1])
    holes = ((run[:, :1] <= tokens) & (tokens < run[:, 1:])) != visible
    return VisibleKeys(each=visible) if bool(holes.any()) else VisibleKeys(run=run)


def check_padding(dims: Mapping[str, int], layout: SequenceLayout, length: int, padded: int, *, apart: bool) -> None:
    """Refuse to pad entries whose padding value is not known.

    Args:
        dims: the entries that carry the sequence.
        layout: the degrees.
        length: tokens as given.
        padded: tokens after padding.
        apart: the padding is there to give the two sequences of an encoder-decoder batch different lengths.
    """
    unknown = [n for n in dims if n not in STANDARD_NAMES]
    if unknown and apart:
        raise SequenceParallelError(
            f"the batch's two sequences would both have {layout.padded_length(length)} tokens, and attention tells them apart by their lengths. "
            f"One would be padded by {layout.multiple} tokens more, but with what {unknown} are to be padded is not known: make one sequence "
            f"longer by {layout.multiple} tokens, or use standard names"
        )
    if unknown:
        raise SequenceParallelError(
            f"sequences of {length} tokens need {padded - length} of padding to be a multiple of {layout.multiple} "
            f"(ring {layout.ring_size} x ulysses {layout.ulysses_size}), but what padding means is not known for {unknown}; "
            f"make the length a multiple of {layout.multiple}, or use standard names"
        )
