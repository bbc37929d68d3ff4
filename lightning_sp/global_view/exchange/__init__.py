"""Tokens of a sequence that the ranks exchange for a function: other positions, whole lines, the k-th smallest of all."""
