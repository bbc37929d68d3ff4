"""Optimizers on shards: what cannot step them steps whole weights, steps by hand, averages of weights."""
