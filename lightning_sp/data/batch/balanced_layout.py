"""The layout that spreads the attention of a batch's documents evenly over the ranks."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightning_sp.attention.plan.balance import Balance, balance
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.context.masks import AttentionPattern
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.layout import SequenceLayout

# What the busiest rank may compute above the mean before `balance="auto"` leaves zigzag.
UNBALANCED = 0.05


def balanced_layout(
    boundaries: Tensor | None, valid: Tensor | None, layout: SequenceLayout, padded: int, options: ShardOptions
) -> Balance | None:
    """Return the layout to use for a batch's documents; None where none are known, or zigzag is wanted."""
    if options.balance == "zigzag" or boundaries is None or layout.ring_size == 1:
        return None
    patterns = options.attention or (AttentionPattern(),)
    masks = {
        pattern: AttentionMask(
            causal=pattern.causal,
            boundaries=boundaries,
            window_size=pattern.window_size,
            chunk_size=pattern.chunk_size,
            valid=valid if pattern.hides_padding else None,
        )
        for pattern in dict.fromkeys(patterns)
    }
    found = balance([masks[pattern] for pattern in patterns], layout, padded, device=options.device)
    if options.balance == "auto" and not (found.pays and found.zigzag_imbalance > UNBALANCED):
        return replace(found, layout=layout)
    return found
