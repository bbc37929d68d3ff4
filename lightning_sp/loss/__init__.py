"""The loss of the global batch: cross entropy over all ranks' tokens, its interception, its check, the weights of micro-batches."""
