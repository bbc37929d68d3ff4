"""The masks of a step's attention: what a layer asks for, joined with the documents and the padding of the batch's sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.context.sequence import SequenceInfo


@dataclass(frozen=True, kw_only=True)
class AttentionPattern:
    """What a layer asks for by itself, whatever the batch's documents are: two layers with equal patterns take equally long.

    Args:
        causal: as `AttentionMask`'s.
        window_size: likewise.
        chunk_size: likewise.
        hides_padding: the layer hides what the batch's padding mask hides.
    """

    causal: bool = True
    window_size: tuple[int | None, int | None] = (None, None)
    chunk_size: int | None = None
    hides_padding: bool = False

    @classmethod
    def of(cls, mask: AttentionMask) -> AttentionPattern:
        """Return the pattern of a layer's mask."""
        return cls(
            causal=mask.causal,
            window_size=mask.window_size,
            chunk_size=mask.chunk_size,
            hides_padding=mask.valid is not None,
        )


def build_mask(
    queries: SequenceInfo,
    keys: SequenceInfo,
    *,
    causal: bool,
    window_size: tuple[int | None, int | None] = (None, None),
    chunk_size: int | None = None,
    hides_padding: bool = False,
) -> AttentionMask:
    """Return the mask of an attention: within the documents, without our own padding, and the rest as the layer asks.

    Args:
        queries: the sequence of the queries.
        keys: that of the keys, another one in cross attention.
        causal: as `AttentionMask`'s.
        window_size: likewise.
        chunk_size: likewise.
        hides_padding: the layer hides what the batch's padding mask hides.
    """
    valid, visible = (keys.valid, keys.visible_keys) if hides_padding else (None, None)
    if visible is not None and keys.padded_length > keys.length:
        visible = F.pad(visible, (0, keys.padded_length - keys.length))
    dense = None if visible is None else visible[:, None, None]
    if keys is not queries:
        if valid is None and visible is None and keys.padded_length > keys.length:
            valid = torch.tensor([[0, keys.length]])
        return AttentionMask(causal=causal, window_size=window_size, chunk_size=chunk_size, valid=valid, dense=dense)
    boundaries = queries.boundaries
    if boundaries is None and queries.padded_length > queries.length and not causal:
        # A causal query does not see the padding behind it; a bidirectional one would.
        boundaries = torch.tensor([[0, queries.length, queries.padded_length]])
    return AttentionMask(
        causal=causal, boundaries=boundaries, window_size=window_size, chunk_size=chunk_size, valid=valid, dense=dense
    )
