"""Attention modules whose heads are projected, rotated and exchanged in stages, and again in the backward."""

from lightning_sp.rewrite.staged_heads.interception import StagedHeads

__all__ = ["StagedHeads"]
