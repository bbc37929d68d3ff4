"""Exact attention over a sequence that several ranks hold: ulysses(ring(block))."""
