"""One rank's part of a batch: what the batch holds, how it is padded, cut and checked."""
