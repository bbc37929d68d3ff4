"""Pieces of `python -m benchmarks.longest_sequence`."""
