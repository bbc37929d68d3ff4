"""A model made ready for sharded steps, once: its degrees, its parameters over the ranks, what it makes of a batch, what is intercepted.

`strategy` calls these in order. Nothing here knows a Trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_sp import comm
from lightning_sp.checkpoint import note_built
from lightning_sp.config import (
    StrategyConfig,
    resolve_shard_size,
)
from lightning_sp.context.step import SequenceContext
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.datamodule import SequenceShardingDataModule
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.compiled.saved import compiled_within
from lightning_sp.global_view.module_boundary import hide_from_fsdp
from lightning_sp.global_view.paths_of_torch import paths_as_on_one_device
from lightning_sp.global_view.user_functions.autograd_functions import watched_functions
from lightning_sp.global_view.user_functions.collectives import collectives_refused
from lightning_sp.global_view.user_functions.scripted_functions import scripted_functions_in_python
from lightning_sp.loss.interception import CrossEntropyInterception
from lightning_sp.loss.output_head.deferred_heads import DeferredHeads
from lightning_sp.mesh import (
    SequenceMesh,
    build_fsdp_mesh,
    fsdp_axes,
    tensor_axis,
)
from lightning_sp.parallelize import (
    COMPILE_BACKEND,
    DelayedWeights,
    InitialState,
    MlpTiles,
    ParameterLayout,
    block_checkpoints,
    blocks_to_compile,
    broadcast_initial_weights,
    cast_as_in_forward,
    check_layout,
    checkpoint_blocks,
    compile_forwards,
    compiled_modules,
    compiles_weights,
    convert_to_float8,
    freed_behind_run,
    functional_calls_of_whole_weights,
    gather_plain_parts,
    is_freed_after_forward,
    make_fsdp_root,
    materialize_meta,
    offload_activations,
    parameter_layout,
    recorded,
    refuse_live_saves,
    remember_layout,
    run_as_written,
    shard_model,
    share_attributes,
    split_model,
    take_over_checkpointing,
    tensor_parallel,
    tied_parameters,
    tile_mlps,
    told_before_freed,
    transformer_blocks,
    used_as_whole,
    used_parameters,
    watched_behind_run,
    whole_bytes_elsewhere,
    whole_state,
)
from lightning_sp.parallelize.captured_parameters import CapturedParameters
from lightning_sp.reductions.scope import ReductionScope
from lightning_sp.rewrite import (
    FlexInterception,
    HuggingFaceRewrite,
    RowDropoutInterception,
    SdpaInterception,
    StagedHeads,
    decoder_inputs,
    hidden_decoder_token,
    hugging_face_models,
    num_virtual_tokens,
    placeholder_ids,
    row_end,
    source_of_decoder_inputs,
    why_no_virtual_tokens,
    why_unreachable,
)
from lightning_sp.rewrite.hugging_face.generation import WholeGeneration
from lightning_sp.rewrite.rebind import BoundNames
from lightning_sp.rewrite.synced_batch_norm import SyncedBatchNorm
from lightning_sp.step.inner_gradients import inner_gradients
from lightning_sp.trainer.features import syncs_batch_norm


def lay_out_model(
    module: nn.Module,
    config: StrategyConfig,
    mesh: SequenceMesh,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Checkpoint, compile and shard a model in place, and give every rank its part of rank 0's weights. Every rank must call it.

    Args:
        module: the model, of the precision that it is trained in.
        config: the options.
        mesh: the attention's, for the line that is logged.
        device: of this rank.
        group: the world, on a backend for host tensors; None is torch's default group.

    Communicates: group creation for FSDP2's mesh; a broadcast of each parameter and buffer.
    """
    world, rank = comm.size_of(comm.world()), comm.rank_in(comm.world())
    layout, shard_size = ParameterLayout.of(config, world), resolve_shard_size(config, world)
    if (before := parameter_layout(module)) is not None:
        check_layout(before, layout)
        share_attributes(module)
        _use_group(module, group)
        block_checkpoints(module).use(config.checkpoint_policy)
        return
    captured, delayed = CapturedParameters(module), DelayedWeights.of(module)
    comm.agree(delayed.refusal or (_materialized(module, delayed, config) if rank == 0 else None))
    if num_bytes := whole_bytes_elsewhere(module):
        rank_zero_info(
            f"sequence_parallel: each of {world} ranks holds the whole model ({num_bytes / 2**20:.1f} MiB) until it is sharded, for it is built "
            "in __init__ or setup, or read from files that are no safetensors; of what configure_model builds no rank holds more than its shard"
        )
    source = _initial_state(module, rank, delayed)
    parameter_mesh = build_fsdp_mesh(
        device.type, world_size=world, shard_size=shard_size, tensor_parallel_size=config.tensor_parallel_size
    )
    if (axis := tensor_axis(parameter_mesh)) is not None:
        split_model(module, config.tensor_parallel_plan, axis, mesh.tensor_group)
    blocks = transformer_blocks(module)
    convert_to_float8(blocks, config.fp8)
    _tile(module, blocks, config.fixed_tile_tokens)
    _checkpoint_and_compile(module, blocks, config, device)
    shard_model(module, blocks, fsdp_axes(parameter_mesh), with_gathers(module, config))
    if axis is not None:
        gather_plain_parts(module)
    shards_on = torch.device("cpu") if config.cpu_offload else device
    broadcast_initial_weights(module, source, tied_parameters(module), device, shards_on=shards_on)
    _to_device(module, device, shards_on)
    make_fsdp_root(module)
    captured.renew()
    share_attributes(module)
    if config.exclude_frozen_parameters:
        note_built(module, group)
    refuse_live_saves(module)
    remember_layout(module, layout)
    _use_group(module, group)
    _say_layout(config, mesh, world, len(blocks))


def _checkpoint_and_compile(
    module: nn.Module, blocks: list[nn.Module], config: StrategyConfig, device: torch.device
) -> None:
    """Let blocks recompute themselves, and compile them: in the global view within that, for a graph recomputes itself."""
    measures = not (config.compile or any(True for _ in compiled_modules(module)))
    # What a compiler makes of a block holds what its Python was: nothing of it is switched later.
    tiles = MlpTiles(blocks, module) if measures and config.mlp_tile_tokens == "as_needed" else None
    waits = config.activation_offload == "auto"
    offload = offload_activations(module, config, device, blocks) if measures or not waits else None
    sees_whole = config.global_view is True
    ours = blocks_to_compile(module, blocks) if config.compile else []
    left = len(blocks) - len(ours) if config.compile else 0
    graphs = compile_forwards(ours) if config.compile and sees_whole else None
    backend = COMPILE_BACKEND if config.compile and not left else ""
    checkpoints = checkpoint_blocks(
        module, blocks, config.checkpoint_policy, measures=measures, offload=offload, graphs=graphs, tiles=tiles, backend=backend,
    )  # fmt: skip
    take_over_checkpointing(module)
    if not sees_whole:
        for block in ours:
            block.compile(
                backend=checkpoints.compile_block if backend else partial(compiled_within, "", COMPILE_BACKEND)
            )
    if left:
        rank_zero_info(f"sequence_parallel: compile=True leaves {left} of {len(blocks)} blocks as you compiled them")


def with_gathers(module: nn.Module, config: StrategyConfig) -> StrategyConfig:
    """Return the options with weights gathered in float32 where a compiler is: it takes none that note how they are read."""
    if config.gather_dtype == "float32" or not (config.compile or compiles_weights(module)):
        return config
    rank_zero_info(
        f"sequence_parallel: gather_dtype={config.gather_dtype!r} gathers float32 here, for compiled code takes no weights that note how they "
        "are read"
    )
    return replace(config, gather_dtype="float32")


def _tile(module: nn.Module, blocks: list[nn.Module], tile_tokens: int | Literal["auto"] | None) -> None:
    if tile_tokens is None:
        return
    num_blocks = tile_mlps(blocks, tile_tokens, module)
    rank_zero_info(
        f"sequence_parallel: MLPs of {num_blocks} of {len(blocks)} blocks run in tiles of tokens"
        + (
            ""
            if num_blocks == len(blocks)
            else "; one with dropout or a capacity, or written out in its block, runs whole"
        )
    )


def _to_device(module: nn.Module, device: torch.device, shards_on: torch.device) -> None:
    """Move what a module holds to its device; shards may stay elsewhere."""
    if shards_on == device:
        module.to(device)
        return
    module._apply(lambda tensor: tensor.to(shards_on if isinstance(tensor, DTensor) else device))  # type: ignore[no-untyped-call]
    for each in module.modules():
        if isinstance(vars(each).get("_device"), torch.device):  # what Lightning's `to` notes
            each._device = device  # type: ignore[assignment]


def _say_layout(config: StrategyConfig, mesh: SequenceMesh, world: int, num_blocks: int) -> None:
    policy = config.checkpoint_policy
    shared = config.effective_ring_transport in ("auto", "shared_memory") and mesh.shares_memory
    rank_zero_info(
        f"sequence_parallel: {mesh.describe()} over {world} ranks, parameters sharded over "
        f"{resolve_shard_size(config, world)}, {num_blocks} blocks{'' if policy in ('auto', 'none') else f', {policy} activation checkpointing'}"
        f"{', ring through shared memory' if shared else ''}"
    )


def _initial_state(module: nn.Module, rank: int, delayed: DelayedWeights) -> InitialState:
    """Return rank 0's weights, of the dtypes that they are trained in; nothing elsewhere."""
    delayed.note_dtypes(module)
    cast_as_in_forward(module)
    delayed.note_dtypes(module)
    return InitialState(whole_state(module) if rank == 0 else {}, delayed)


def _use_group(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    if (used := used_parameters(module)) is not None:
        used.group = group


def _materialized(module: nn.Module, delayed: DelayedWeights, config: StrategyConfig) -> str | None:
    """Give rank 0's meta parameters memory, or recipes; return why that is not possible, for all ranks."""
    try:
        with recorded(module, draws=True) if config.delayed_init else nullcontext():
            materialize_meta(module, torch.device("cpu"), delayed.names)
    except SequenceParallelError as refusal:
        return str(refusal)
    delayed.add(DelayedWeights.of(module))
    return delayed.refusal


def shard_options(
    module: nn.Module, datamodule: object, config: StrategyConfig, device: torch.device, *, global_view: bool
) -> ShardOptions:
    """Return what is known of the batches: declared, or by the model and the data themselves.

    Args:
        module: the model.
        datamodule: the data's; None where it comes from loaders.
        config: the options.
        device: of this rank.
        global_view: whether steps see whole sequences.
    """
    packed, shifted = config.packed_documents, config.labels_shifted
    if packed is None and isinstance(datamodule, SequenceShardingDataModule):
        packed = True
    if global_view:
        return ShardOptions(
            sequence_dims=dict(config.sequence_dims or {}),
            none_declared=config.sequence_dims == {},
            labels_shifted=True,  # as they are: the step shifts them, or not
            packed_documents=packed,
            balance=config.balance,
            device=device.type,
            global_view=True,
        )
    models = hugging_face_models(module)
    of_labels = decoder_inputs(models)
    if of_labels is not None and shifted is None:
        shifted = True  # the decoder's inputs are shifted instead
    return ShardOptions(
        sequence_dims=dict(config.sequence_dims or {}),
        none_declared=config.sequence_dims == {},
        unreachable=next(filter(None, map(why_unreachable, models)), "") or why_no_virtual_tokens(module),
        labels_shifted=shifted,
        model_shifts_labels=bool(models) and of_labels is None,
        packed_documents=packed,
        balance=config.balance,
        device=device.type,
        decoder_inputs=of_labels,
        decoder_inputs_of=source_of_decoder_inputs(models),
        decoder_hides=hidden_decoder_token(models),
        placeholders=placeholder_ids(models),
        row_end=row_end(models),
        virtual_tokens=num_virtual_tokens(module),
    )


@contextmanager
def interceptions(context: SequenceContext, module: nn.Module, config: StrategyConfig) -> Iterator[None]:
    """Make a step's loss and attention ours, and numbers of shards whole, while this is entered."""
    names, whole_view, mesh = BoundNames(module), context.global_view, context.run_mesh
    sizes = mesh.layout.size, mesh.data_parallel_size
    if whole_view:
        hide_from_fsdp(module)
    if (split := tensor_parallel(module)) is not None:
        context.inside_split_layers = split.inside_now
    blocks = [] if config.recomputed_stages == 1 or whole_view else transformer_blocks(module)
    entered: list[AbstractContextManager[Any]] = [
        used_as_whole(module),
        freed_behind_run(module),
        watched_behind_run(module),
        functional_calls_of_whole_weights(),
        inner_gradients(context, module),
        ReductionScope(context),
        CrossEntropyInterception(context, names.rebind_to),
        RowDropoutInterception(context, names),
        SdpaInterception(context, names),
        DeferredHeads(context, module, config.loss_chunk_tokens, is_freed_after_forward, told_before_freed),
        WholeGeneration(context, module),
    ]
    if syncs_batch_norm(module):
        entered.append(SyncedBatchNorm(context, names))
    # A model that sees whole sequences needs no other attention, mask or position than its own.
    entered += (
        [
            watched_functions(),
            scripted_functions_in_python(),
            paths_as_on_one_device(),
            collectives_refused(sizes, names.rebind_to),
        ]
        if whole_view
        else [
            FlexInterception(context, names),
            HuggingFaceRewrite(context, module),
            StagedHeads(context, blocks, config.recomputed_stages, list(compiled_modules(module))),
        ]
    )
    with ExitStack() as stack:
        for each in entered:
            stack.enter_context(each)
        as_written = run_as_written(module, with_functions=not config.compile)
        if whole_view and (number := stack.enter_context(as_written)):
            rank_zero_info(
                f"sequence_parallel: the global view runs {number} modules and functions that you compiled as they are written, for their "
                "graphs know nothing of it; global_view=True with compile=True compiles its blocks"
            )
        if not whole_view and mesh.layout.size > 1:
            of_rows = collectives_refused(sizes, names.rebind_to, rows_alone=lambda: context.last_is_whole)
            context.before_whole_rows = [partial(stack.enter_context, of_rows)]
            stack.callback(context.before_whole_rows.clear)
        yield
