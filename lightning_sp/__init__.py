"""Sequence parallelism for PyTorch Lightning."""
