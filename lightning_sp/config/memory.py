"""Options that trade memory for time: where parameters lie, and what of the activations is kept."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sp.config.checks import Size, check_size


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What each rank holds of a model and its activations; nothing of it changes a result.

    Args:
        shard_size: Ranks over which FSDP2 splits parameters; the rest of the world replicates. "auto": the whole world.
        activation_checkpointing: Recompute each transformer block in the backward, but never its attention.
        mlp_tile_tokens: Tokens of a tile in which the MLPs of blocks are computed, and recomputed in the backward: of their wide activations one
            tile's are alive. "auto": as many as the MLP's input has features. None: whole.

    Raises:
        SequenceParallelError: a value that the option does not take.
    """

    shard_size: Size = "auto"
    activation_checkpointing: bool = False
    mlp_tile_tokens: Size | None = None

    def __post_init__(self) -> None:
        check_size("shard_size", self.shard_size)
        if self.mlp_tile_tokens is not None:
            check_size("mlp_tile_tokens", self.mlp_tile_tokens)
