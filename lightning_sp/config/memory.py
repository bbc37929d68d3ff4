"""Options that trade memory for time: where parameters lie, and what of the activations is kept."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_sp.config.checks import Size, check_size


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What each rank holds of a model and its activations; nothing of it changes a result.

    Args:
        shard_size: Ranks over which FSDP2 splits parameters; the rest of the world replicates. "auto": the whole world.
        loss_chunk_tokens: Tokens whose logits exist at a time in the cross entropy of a language model's head. "auto": about 32 MiB of them, 64
            tokens at least. None: the logits of all tokens, in the copies that torch makes.
        activation_checkpointing: Recompute each transformer block in the backward, but never its attention.

    Raises:
        SequenceParallelError: a value that the option does not take.
    """

    shard_size: Size = "auto"
    loss_chunk_tokens: Size | None = "auto"
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        check_size("shard_size", self.shard_size)
        if self.loss_chunk_tokens is not None:
            check_size("loss_chunk_tokens", self.loss_chunk_tokens)
