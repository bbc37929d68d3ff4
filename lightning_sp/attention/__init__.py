"""Attention over sequences split across ranks: ulysses(ring(block))."""

from lightning_sp.attention.sequence_parallel import sequence_parallel_attention
from lightning_sp.attention.spec.documents import boundaries_from_lengths, boundaries_from_positions
from lightning_sp.attention.spec.dropout import AttentionDropout
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.attention.spec.position_bias import alibi, alibi_slopes, relative_position_bias
from lightning_sp.attention.spec.score_mod import ScoreMod

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
