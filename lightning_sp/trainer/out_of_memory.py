"""An out-of-memory error says what the memory was for, and what would need less of it by how much."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sp.config import StrategyConfig
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.mesh import SequenceMesh
from lightning_sp.parallelize import block_checkpoints
from lightning_sp.parallelize.memory.memory_prediction import (
    GIB,
    LEAST,
    TILED,
    StepBytes,
    bytes_per_token,
    step_bytes,
)
from lightning_sp.parallelize.memory.model_bytes import largest_unit_bytes, model_bytes, step_of_shapes

# Remedies that a message names, and the least that one saves, of what activations need.
_SHOWN, _LEAST = 3, 0.02
_UNITS = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10}


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank's memory is for when a step fails, in bytes.

    Args:
        parameters: its shards.
        gradients: of them.
        optimizer: its state.
        gathered: parameters and gradients that FSDP has whole at a time.
        accumulated: gradients of whole weights, between micro-batches.
        freed_in_backward: gradients of all but the largest unit of FSDP; 0 where the run needs all of them at once.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    accumulated: int = 0
    freed_in_backward: int = 0

    @property
    def shards(self) -> int:
        """All that is split over ranks."""
        return self.parameters + self.gradients + self.optimizer


def explain_out_of_memory(
    error: BaseException,
    module: LightningModule,
    config: StrategyConfig,
    mesh: SequenceMesh | None,
    batch: SequenceInfo | None,
    shard_size: int,
) -> None:
    """Add to an out-of-memory error of torch, of a GPU or a CPU, what is known of its causes; leave any other as it is.

    Args:
        error: its message grows; it stays of its class, which Lightning's `Tuner` and others know it by.
        module: sharded.
        config: of the run.
        mesh: the attention's; None before the model is laid out.
        batch: the last one; None before there is one.
        shard_size: ranks over which parameters are split.
    """
    has_words = bool(error.args) and isinstance(error.args[0], str)  # what Lightning's test reads
    if mesh is None or batch is None or not has_words or not is_oom_error(error):
        return
    trainer: Any = module.trainer
    tokens = batch.local_tokens
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    checkpoints = block_checkpoints(module)
    whole = model_bytes(module, checkpoints.blocks, (), device)
    keeps = config.accumulates_whole and trainer.accumulate_grad_batches > 1
    of_whole = model_bytes(module, checkpoints.blocks, (), device, accumulates_whole=keeps)
    held = Held(
        parameters=_bytes(module.parameters()),
        gradients=_bytes(each.grad for each in module.parameters() if each.grad is not None),
        optimizer=_bytes(_state(trainer.optimizers)),
        gathered=whole.gathered,
        accumulated=of_whole.gradients - whole.gradients,
        freed_in_backward=0 if _needs_all_gradients(module) else max(0, whole.gradients - largest_unit_bytes(module)),
    )
    policy = checkpoints.policy if checkpoints.policy in checkpoints.candidates else "none"
    left = checkpoints.activations.step or step_of_shapes(
        module, checkpoints.blocks, trainer.precision, checkpoints.tiles
    )
    left = left.offering(tiles=checkpoints.can_tile(trainer.strategy.sees_whole_sequences), horizon=checkpoints.horizon)
    activations = step_bytes(policy, left, tokens)
    most_shards = int(mesh.base.size()) // mesh.tensor_parallel_size
    known = remedies(
        held, left, tokens, policy, config, ranks=mesh.layout.size, world=most_shards, shard_size=shard_size,
        on_gpu=device.type == "cuda",
    )  # fmt: skip
    least = _LEAST * activations
    followed = ", ".join(f"{name}={value!r}" for name, value in checkpoints.as_options(policy).items())
    shown = [f"{what} ({_size(less)} less)" for what, less in known if less > least][:_SHOWN]
    error.args = (
        f"{error.args[0]}\nsequence_parallel: out of memory after {trainer.global_step:,} steps, at {tokens:,} tokens of this rank. Parameters "
        f"{_size(held.parameters)}, gradients {_size(held.gradients + held.accumulated)}, optimizer {_size(held.optimizer)}, whole at a time "
        f"for FSDP up to {_size(held.gathered)}; activations as predicted {_size(activations)}, with {followed}. What would need "
        f"less, the cheapest in time first: {'; '.join(shown)}",
    )


def remedies(
    held: Held,
    step: StepBytes,
    tokens: int,
    policy: str,
    config: StrategyConfig,
    *,
    ranks: int,
    world: int,
    shard_size: int,
    on_gpu: bool,
) -> Iterator[tuple[str, float]]:
    """Yield what saves memory and about how many bytes, the cheapest in time first.

    Args:
        held: what stays.
        step: what a step leaves.
        tokens: of this rank.
        policy: that was followed.
        config: of the run.
        ranks: that share a sequence.
        world: of all.
        shard_size: ranks over which parameters are split.
        on_gpu: whether the host has memory of its own.
    """
    whole = step_bytes(policy, step, tokens)
    if config.loss_chunk_tokens is None:
        yield "loss_chunk_tokens='auto'", step.outside / step.tokens * tokens
    if held.accumulated:
        yield "sync_each_batch=True", float(held.accumulated)
    if held.freed_in_backward and not config.optimizer_in_backward:
        yield "optimizer_in_backward=True", float(held.freed_in_backward)
    if shard_size < world:
        yield f"shard_size={world} for {shard_size}", held.shards * (1 - shard_size / world)
    followed = LEAST.index(policy) if policy in LEAST else -1
    for other in LEAST[followed + 1 :]:
        if other not in TILED:
            yield f"activation_checkpointing={other!r}", whole - step_bytes(other, step, tokens)
    under_full = whole - step_bytes("full", step, tokens)
    in_tiles = whole - step_bytes("full_tiled", step, tokens)
    if policy not in TILED and in_tiles > under_full:
        yield "activation_checkpointing='full' with mlp_tile_tokens='auto'", in_tiles
    if config.fixed_offload == "none" and policy != "full_offloaded" and not config.compile:
        inputs = sum(block.inputs for block in step.blocks if block) / step.tokens * tokens
        where = "host" if on_gpu else "disk"
        tiles, under = (" with mlp_tile_tokens='auto'", in_tiles) if policy in TILED else ("", under_full)
        yield f"activation_checkpointing='full'{tiles} with activation_offload={where!r}", under + inputs
    if on_gpu and not config.cpu_offload:
        yield "cpu_offload=True", float(held.shards)
    yield (
        f"sequence_parallel_size={2 * ranks} for {ranks}, or half as many tokens",
        bytes_per_token(policy, step) * tokens / 2,
    )


def _needs_all_gradients(module: LightningModule) -> bool:
    """Return whether a run clips, accumulates or steps by hand."""
    trainer = module.trainer
    needs = trainer.accumulate_grad_batches > 1 or trainer.gradient_clip_val
    return bool(needs or not module.automatic_optimization)


def _state(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (each for each in state.values() if isinstance(each, Tensor))


def _bytes(tensors: Iterable[Any]) -> int:
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return sum(_own_bytes(each) for each in local)


def _own_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor, of a quantized one those of its codes and scales."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        return sum(_own_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    size: int = tensor.numel() * tensor.element_size()
    return size


def _size(number: float) -> str:
    unit = next((name for name in ("GiB", "MiB") if number >= _UNITS[name] / 10), "KiB")
    return f"{number / _UNITS[unit]:.2f} {unit}"
