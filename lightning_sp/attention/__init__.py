"""Attention over sequences split across ranks: ulysses(ring(block))."""

from lightning_sp.attention.mask import AttentionMask, boundaries_from_lengths, boundaries_from_positions
from lightning_sp.attention.sequence_parallel import sequence_parallel_attention

__all__ = ["AttentionMask", "boundaries_from_lengths", "boundaries_from_positions", "sequence_parallel_attention"]
