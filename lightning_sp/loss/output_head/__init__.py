"""A loss whose logits are never all there: an output head that waits for what reads it, and computes in chunks."""
