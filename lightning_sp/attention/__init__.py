"""Attention over sequences split across ranks: ulysses(ring(block))."""

from lightning_sp.attention.dropout import AttentionDropout
from lightning_sp.attention.functions import ScoreMod, alibi, alibi_slopes, relative_position_bias
from lightning_sp.attention.mask import AttentionMask, boundaries_from_lengths, boundaries_from_positions
from lightning_sp.attention.sequence_parallel import sequence_parallel_attention

__all__ = [
    "AttentionDropout",
    "AttentionMask",
    "ScoreMod",
    "alibi",
    "alibi_slopes",
    "boundaries_from_lengths",
    "boundaries_from_positions",
    "relative_position_bias",
    "sequence_parallel_attention",
]
