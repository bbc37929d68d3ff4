"""Parameters, activations and compilation: how a model is laid over the ranks."""

from lightning_sp.parallelize.activation_checkpointing import (
    BlockCheckpoints,
    block_checkpoints,
    checkpoint_blocks,
    measured_step,
    refuses_measuring,
    take_over_checkpointing,
    without_checkpoints,
)
from lightning_sp.parallelize.activation_offload import activation_offload, offload_activations
from lightning_sp.parallelize.compilation import compile_blocks, compiled_modules, is_compiled
from lightning_sp.parallelize.delayed_init import DelayedWeights, recorded
from lightning_sp.parallelize.fsdp import (
    ParameterLayout,
    RootUnit,
    cast_as_in_forward,
    check_layout,
    check_unsharded,
    gathered,
    is_freed_after_forward,
    make_fsdp_root,
    optional_units,
    parameter_layout,
    reduce_dtypes,
    remember_layout,
    reshard,
    run_with_whole_parameters,
    shard_model,
    used_as_whole,
    used_parameters,
    without_gradient_sync,
    write_counts,
)
from lightning_sp.parallelize.initial_weights import (
    InitialState,
    broadcast_initial_weights,
    materialize_meta,
    tied_parameters,
    whole_bytes_elsewhere,
    whole_state,
)
from lightning_sp.parallelize.live_saves import refuse_live_saves
from lightning_sp.parallelize.meta_device import MetaDevice
from lightning_sp.parallelize.supported_parameters import check_hooks, check_optimized, check_parameters
from lightning_sp.parallelize.tiled_mlp import tile_mlps, without_tiles
from lightning_sp.parallelize.transformer_blocks import transformer_blocks

__all__ = [
    "BlockCheckpoints",
    "DelayedWeights",
    "InitialState",
    "MetaDevice",
    "ParameterLayout",
    "RootUnit",
    "activation_offload",
    "block_checkpoints",
    "broadcast_initial_weights",
    "cast_as_in_forward",
    "check_hooks",
    "check_layout",
    "check_optimized",
    "check_parameters",
    "check_unsharded",
    "checkpoint_blocks",
    "compile_blocks",
    "compiled_modules",
    "gathered",
    "is_compiled",
    "is_freed_after_forward",
    "make_fsdp_root",
    "materialize_meta",
    "measured_step",
    "offload_activations",
    "optional_units",
    "parameter_layout",
    "recorded",
    "reduce_dtypes",
    "refuse_live_saves",
    "refuses_measuring",
    "remember_layout",
    "reshard",
    "run_with_whole_parameters",
    "shard_model",
    "take_over_checkpointing",
    "tied_parameters",
    "tile_mlps",
    "transformer_blocks",
    "used_as_whole",
    "used_parameters",
    "whole_bytes_elsewhere",
    "whole_state",
    "without_checkpoints",
    "without_gradient_sync",
    "without_tiles",
    "write_counts",
]
