"""Communication that only CPU ranks use: shared memory and pipes on one host, and all-pairs messages in place of gloo's own collectives."""
