"""Heads of Hugging Face models over whole sequences: classifiers and answers to questions."""

from lightning_sp.rewrite.hugging_face.heads.give import give_whole_sequences_to_heads

__all__ = ["give_whole_sequences_to_heads"]
