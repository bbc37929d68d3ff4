"""FSDP2, activation checkpointing and compilation, applied from outside."""
