"""Lets any Hydra application of this environment compose lightning_sp's config groups (searchpath.py)."""
