"""Inputs of checkpointed blocks that leave the device, or the memory, between forward and backward."""

from lightning_sp.parallelize.activation_offload.horizon import (
    ActivationOffload,
    activation_offload,
    offload_activations,
)

__all__ = ["ActivationOffload", "activation_offload", "offload_activations"]
