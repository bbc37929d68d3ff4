"""Parameters, activations and compilation: how a model is laid over the ranks."""

from lightning_sp.parallelize.blocks import num_query_heads, transformer_blocks
from lightning_sp.parallelize.checkpointing import checkpoint_blocks
from lightning_sp.parallelize.fsdp import check_unsharded, reshard, shard_model, start_root, without_gradient_sync
from lightning_sp.parallelize.initialize import materialize_meta, receive_weights, tied_parameters, whole_state

__all__ = [
    "check_unsharded",
    "checkpoint_blocks",
    "materialize_meta",
    "num_query_heads",
    "receive_weights",
    "reshard",
    "shard_model",
    "start_root",
    "tied_parameters",
    "transformer_blocks",
    "whole_state",
    "without_gradient_sync",
]
