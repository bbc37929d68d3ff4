"""What the benchmarks measure with: bytes sent and written, resident memory, a device without a machine."""
