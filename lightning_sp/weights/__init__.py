"""What a weight is beside its numbers: cast under autocast, quantized, a single number of shape (), a part of a vocabulary."""
