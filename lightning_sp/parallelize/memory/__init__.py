"""Bytes of a rank: what a model holds, what a step leaves for its backward, the peak that follows, and what a device has."""
