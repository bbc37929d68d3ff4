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
        delayed_init: Give what `configure_model` draws or reads memory tensor by tensor, when it is sharded. False: rank 0 builds the whole
            model in its memory, and each rank reads the whole of a pretrained one.

    Raises:
        SequenceParallelError: a value that the option does not take.
    """

    shard_size: Size = "auto"
    activation_checkpointing: bool = False
    delayed_init: bool = True

    def __post_init__(self) -> None:
        check_size("shard_size", self.shard_size)
