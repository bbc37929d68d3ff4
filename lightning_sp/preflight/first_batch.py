"""The preflight on a run's first batch: a crop of it through the user's own training_step, whole and sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.distributed import ProcessGroup

from lightning_sp.context.dropout import DropoutSource
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharded_batch import is_sharded
from lightning_sp.data.batch.sharding import shard_batch
from lightning_sp.layout import SequenceLayout
from lightning_sp.mesh import SequenceMesh
from lightning_sp.parallelize import run_on_gathered
from lightning_sp.preflight.agreement import run_preflight
from lightning_sp.preflight.crop import shared_crop
from lightning_sp.step.run import Steps

# Of the attention dropout in both runs.
DROPOUT_SEED = 1234
# Runs training_step on a batch of the host, as the precision and the device want it; given what was whole.
RunStep = Callable[[Any, SequenceInfo], Any]


def try_first_batch(
    batch: Any,
    module: LightningModule,
    steps: Steps,
    run: RunStep,
    *,
    options: ShardOptions,
    tokens: int | None,
    by_hand: bool,
    device: torch.device,
    sequence_group: ProcessGroup,
    control_group: ProcessGroup | None,
) -> None:
    """Compare training_step on a crop of the batch, whole and sharded; it leaves no trace. Every rank must call it.

    Args:
        batch: as the loader gave it.
        module: the model.
        steps: what runs its steps.
        run: the user's training_step on a batch.
        options: which tensors carry the sequence.
        tokens: of the crop; None for what the degrees need.
        by_hand: the batch is this rank's part already.
        device: where the model is.
        sequence_group: the ranks that share a sequence, on a backend for host objects.
        control_group: the world, likewise.

    Raises:
        SequenceParallelError: they differ, or the step cannot run on a crop.
    """
    if not module.automatic_optimization:
        rank_zero_info(
            "preflight: skipped, for with manual optimization training_step moves the optimizers itself and cannot be tried without a trace"
        )
        return
    mesh: SequenceMesh = steps.context.mesh
    crop, own = shared_crop(
        batch,
        options,
        mesh.layout,
        wanted=tokens,
        hand_sharded=by_hand or is_sharded(batch),
        place=(mesh.data_parallel_rank, mesh.sequence_rank),
        sequence_group=sequence_group,
        control_group=control_group,
    )
    if crop.num_targets == 0:
        rank_zero_warn("preflight: not possible, for every target of the first batch is ignored: nothing was compared")
        return
    whole, whole_info = shard_batch(crop.batch, SequenceLayout(), 0, replace(options, apart=False))
    # A crop is too short for balance="auto" to leave zigzag: what the run may do is tried.
    tried = options if options.balance == "zigzag" else replace(options, balance="documents")
    local, info = shard_batch(own.batch, mesh.layout, mesh.sequence_rank, tried)
    # The rows of the groups' crops stand one after the other in the whole one.
    first = mesh.data_parallel_rank % (crop.rows // own.rows) * own.rows
    whole_info, info = (
        replace(each, dropout=DropoutSource(DROPOUT_SEED, 0, torch.arange(start, start + rows))).to(device)
        for each, start, rows in ((whole_info, 0, crop.rows), (info, first, own.rows))
    )
    trainer = module.trainer
    loggers, trainer.loggers = trainer.loggers, [DummyLogger() for _ in trainer.loggers]
    try:
        found = run_preflight(
            module,
            steps.context,
            whole=lambda: run_on_gathered(lambda: run(whole, whole_info)),
            sharded=lambda: steps.train(info, lambda: run(local, info)),
            whole_batch=whole_info,
            crop=f"a crop of {crop.rows} x {crop.tokens} tokens",
            device=device,
        )
    finally:
        trainer.loggers = loggers
        steps.start_run()
    if found is not None:
        rank_zero_info(found.describe())
