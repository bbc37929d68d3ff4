"""One file a competitor: how its attention is called on a rank, and which tokens the rank holds. See `benchmarks.attention_peers`."""
