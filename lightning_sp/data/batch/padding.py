"""Padding of a batch: what its attention_mask hides, and what may be padded to a length that the degrees divide."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sp.data.batch.entries import STANDARD_NAMES
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout


def visible_keys(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return what each row's padding mask leaves: the run of tokens, or every token by itself where it is no run; neither where it hides none.

    Shapes: (B, S) -> (B, 2), int64 on the CPU, or (B, S), bool.

    Raises:
        SequenceParallelError: the mask is not one of tokens.
    """
    if mask.dim() != 2:
        raise SequenceParallelError(
            f"attention_mask of shape {tuple(mask.shape)}: must be (batch, tokens); a mask of queries and keys goes under another name, whole"
        )
    left = mask.cpu() != 0
    if bool(left.all()):
        return None, None
    counts = left.sum(1)
    start = left.long().argmax(1)
    valid = torch.stack([start, start + counts], 1)
    tokens = torch.arange(mask.shape[1])
    holes = ((valid[:, :1] <= tokens) & (tokens < valid[:, 1:])) != left
    return (None, left) if bool(holes.any()) else (valid, None)


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
            f"the batch's two sequences would both have {layout.padded_length(length)} tokens, by whose number attention tells them apart where "
            f"their masks differ, and what {layout.multiple} tokens of padding more mean is not known for {unknown}: make one of them longer by "
            f"{layout.multiple} tokens, or use standard names"
        )
    if unknown:
        raise SequenceParallelError(
            f"sequences of {length} tokens need {padded - length} of padding to be a multiple of {layout.multiple} "
            f"(ring {layout.ring_size} x ulysses {layout.ulysses_size}), but what padding means is not known for {unknown}; "
            f"make the length a multiple of {layout.multiple}, or use standard names"
        )
