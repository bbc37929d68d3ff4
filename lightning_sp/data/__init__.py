"""From documents to the batch of one rank: tokens, windows, shards."""
