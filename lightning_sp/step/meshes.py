"""The ranks' meshes for a model: over data and sequences, and of a sequence's ranks ring x ulysses, by the model's heads and the nodes."""

from __future__ import annotations

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_sp import comm
from lightning_sp.config import (
    StrategyConfig,
    check_memory_device,
    needless_exchange,
    ranks_without_heads,
    resolve_degrees,
    resolve_shard_size,
    resolve_split,
    without_effect,
)
from lightning_sp.mesh import SequenceMesh, build_device_mesh, check_ring_transport
from lightning_sp.nodes import Placement, common_ranks_per_node
from lightning_sp.parallelize import (
    check_float8_device,
    check_float8_layers,
    check_parameters,
    check_unsharded,
    parameter_layout,
)
from lightning_sp.step.rank_heads import heads_of_rank


def base_mesh(config: StrategyConfig, device: torch.device, world_size: int) -> DeviceMesh:
    """Return the mesh data_parallel x sequence_parallel x tensor_parallel. Every rank must call it.

    Communicates: group creation.

    Raises:
        SequenceParallelError: the degrees or the shard size do not divide the world, or the device lacks what an option needs.
    """
    check_memory_device(config, device.type)
    check_float8_device(config.fp8, device)
    degrees = resolve_degrees(config, world_size)
    resolve_shard_size(config, world_size)
    return build_device_mesh(
        device.type,
        data_parallel_size=degrees.data_parallel_size,
        sequence_parallel_size=degrees.sequence_parallel_size,
        tensor_parallel_size=degrees.tensor_parallel_size,
    )


def attention_mesh(
    module: nn.Module,
    config: StrategyConfig,
    base: DeviceMesh,
    device: torch.device,
    ranks_per_node: int | None = None,
) -> SequenceMesh:
    """Split the ranks of a sequence into ring x ulysses, by the model's heads and the nodes. Every rank must call it.

    Args:
        module: the model, not yet sharded.
        config: the options.
        base: the mesh data_parallel x sequence_parallel x tensor_parallel.
        device: of this rank.
        ranks_per_node: how many ranks this rank's node has; None for one node.

    Communicates: what `SequenceMesh.build` does; one all_gather of the ranks per node; one broadcast of the number of heads where no module
    names it.

    Raises:
        SequenceParallelError: the model is sharded already, or the degrees or the transport do not fit it.
    """
    check_unsharded(module)
    if parameter_layout(module) is None:
        check_parameters(module)
    size = int(base["sequence_parallel"].size())
    check_float8_layers(module, size)
    heads, kv_heads = heads_of_rank(module, config, size, device)
    placement = None if heads is None or size == 1 else _placement(base, heads, kv_heads, ranks_per_node)
    ulysses, ring = resolve_split(config, size, heads, placement)
    few = None if heads is None else ranks_without_heads(ulysses, size, heads)
    line = few or (None if placement is None else needless_exchange(config, ulysses, placement))
    for each in (line, without_effect(config, ulysses, ring)):
        if each:
            rank_zero_info(f"sequence_parallel: {each}")
    mesh = SequenceMesh.build(base, ring_size=ring, ulysses_size=ulysses)
    check_ring_transport(config.ring_transport, mesh)
    return mesh


def _placement(base: DeviceMesh, heads: int, kv_heads: int | None, ranks_per_node: int | None) -> Placement:
    """Return the ranks on their nodes, with the heads of each part of the weights: the same on all, for all choose by it."""
    world = int(base.size())
    return Placement(
        world_size=world,
        sequence_parallel_size=int(base["sequence_parallel"].size()),
        ranks_per_node=common_ranks_per_node(world, comm.gather_objects(ranks_per_node or world)),
        num_heads=heads,
        num_kv_heads=min(kv_heads or heads, heads),
        tensor_parallel_size=int(base["tensor_parallel"].size()),
    )
