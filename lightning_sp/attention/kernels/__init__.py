"""One local attention call: out and lse of a block, and its gradients."""
