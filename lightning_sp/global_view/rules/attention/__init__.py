"""Rules of attention: torch's own functions, and queries, keys and values that a model multiplies itself."""
