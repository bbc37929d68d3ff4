"""Differences that are no fault of a part's step: found by another run, and told from faults."""
