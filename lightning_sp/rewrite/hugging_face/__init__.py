"""Hugging Face models: their attention interface, masks, positions, biases."""
