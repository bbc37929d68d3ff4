"""The crops of all data-parallel groups as one batch, the same on every rank: what a single device would train on."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.config import StrategyConfig
from lightning_sp.data.batch.contents.entries import plain_entries, sequence_dims
from lightning_sp.data.batch.contents.media import entries_digest, is_of_media
from lightning_sp.data.batch.contents.several_sequences import batch_sequences
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharded_batch import is_sharded
from lightning_sp.errors import SequenceParallelError, told_error
from lightning_sp.layout import SequenceLayout, merge
from lightning_sp.preflight.crops.crop import (
    ROWS,
    Crop,
    common_extent,
    crop_batch,
    crop_extent,
    has_rows,
    longer_tokens,
    rebuild_plain,
    whole_extent,
)
from lightning_sp.preflight.crops.media import placeholders
from lightning_sp.step.runner import StepRunner

# Groups whose crops differ: each adds its rows to what every rank runs whole.
MOST_GROUPS = 8
# Tokens of a longer crop that are always affordable: the groups' crops together have as many.
LONGER_TOKENS = 1024


def whole_batch(batch: Any, options: ShardOptions, layout: SequenceLayout, group: ProcessGroup) -> Any:
    """Return the whole batch of which every rank of a sequence holds a part that was sharded by hand, on the CPU.

    Communicates: one all_gather for each tensor that carries the sequence, over a group that takes CPU tensors.
    """
    entries = plain_entries(batch)
    dims = sequence_dims(entries, options)
    merged = {
        n: merge(comm.gather(v.cpu(), group), layout, dim=dims[n]) if n in dims else v for n, v in entries.items()
    }
    return rebuild_plain(batch, merged)


def crops_of(
    batch: Any, runner: StepRunner, config: StrategyConfig, options: ShardOptions
) -> Callable[..., tuple[Crop, Crop]]:
    """Return what makes a run's crops of a length: `shared_crop` of a batch of its loader, but for `wanted` and what follows it."""
    mesh = runner.context.mesh
    return partial(
        shared_crop,
        batch,
        options,
        mesh.layout,
        hand_sharded=not config.shard_batch or is_sharded(batch),
        data_parallel_rank=mesh.data_parallel_rank,
        sample_rank=mesh.sample_rank,
        sequence_group=runner.groups.sequence,
        control_group=runner.groups.world,
    )


def shared_crop(
    batch: Any,
    options: ShardOptions,
    layout: SequenceLayout,
    *,
    wanted: int | None,
    hand_sharded: bool,
    data_parallel_rank: int,
    sample_rank: int,
    sequence_group: ProcessGroup,
    control_group: ProcessGroup | None,
    longer: bool = False,
    all_rows: bool = False,
    checkpointed: bool = False,
) -> tuple[Crop, Crop]:
    """Return the crops of all data-parallel groups' batches as one, the same on every rank, and that of this rank's group.

    Args:
        batch: this rank's, whole; its part of it where `hand_sharded`.
        options: of sharding.
        layout: the degrees.
        wanted: see `crop_tokens`.
        hand_sharded: whether the parts must be merged first.
        data_parallel_rank: of this rank.
        sample_rank: of this rank, among those that compute its samples.
        sequence_group: ranks that share the sequence.
        control_group: the world. Both on a backend for the host.
        longer: whether as many tokens are wanted as a step can afford, of one row if the entries let it.
        all_rows: whether every row is wanted, and not the few that show what a step does with several.
        checkpointed: whether a step affords its tokens by checkpoints alone, which a whole run has not.

    Raises:
        SequenceParallelError: the groups' crops cannot be made into one batch.
    """
    if hand_sharded:
        batch = whole_batch(batch, options, layout, sequence_group)
    most_rows = 1 if longer else whole_extent(batch, options)[0] if all_rows else ROWS
    if longer:
        rows, *lengths = whole_extent(batch, options)
        kept = crop_extent(batch, options, layout, most_rows=1)[0]
        of_step = 0 if checkpointed else rows // kept
        wanted = longer_tokens(of_step, max(lengths), layout, least=LONGER_TOKENS // kept)
    # The groups' batches may have other lengths and images at other places; one crop suits all.
    extents = comm.gather_objects(
        (
            crop_extent(batch, options, layout, wanted, most_rows=most_rows),
            whole_extent(batch, options),
            placeholders(plain_entries(batch), options) is not None,
        ),
        control_group,
    )
    own = crop_batch(batch, options, common_extent(*zip(*extents, strict=True)))
    comm.agree(_why_it_stays(own) if sample_rank == 0 else None, control_group)
    gathered = comm.gather_objects(own if sample_rank == 0 else None, control_group)
    crops: list[Crop] = [crop for crop in gathered if crop is not None]
    # Several groups may share a crop as long as each is shared by equally many: the mean over the tokens stays the same.
    num_groups = max(k for k in range(1, MOST_GROUPS + 1) if len(crops) % k == 0)
    uneven = len({entries_digest(crop.batch) for crop in crops}) > 1
    joined, own = join_crops(crops[:num_groups], options), crops[data_parallel_rank % num_groups]
    return replace(joined, uneven_entries=uneven), replace(own, uneven_entries=uneven)


def _why_it_stays(crop: Crop) -> str | None:
    """Return what of a crop cannot travel between ranks: an object without a pickled form, a lock or a generator say."""
    stays = []
    for name, value in plain_entries(crop.batch).items():
        try:
            pickle.dumps(value)
        except Exception as error:  # whatever an object's own pickling raises
            stays.append(f"{name!r} ({told_error(error)})")
    if not stays:
        return None
    return (
        f"preflight: the batch's entries {', '.join(stays)} cannot be sent to other ranks, which try one crop together; leave them out in the "
        "collate function, make plain values of them, or train with preflight=False"
    )


def join_crops(crops: list[Crop], options: ShardOptions) -> Crop:
    """Return crops of equal extent as one: the rows of all. What has no rows is the first's.

    Raises:
        SequenceParallelError: they hold different entries, or their sequences lie along dim 0 and have no rows.
    """
    first = crops[0]
    if len(crops) == 1:
        return first
    entries_of = [plain_entries(crop.batch) for crop in crops]
    found = batch_sequences(entries_of[0], options)
    dims, rows_each = found.dims, {name: each.rows_each for each in found.beside for name in each.dims}
    # A group may hold no images at all.
    media = {name: value for entries in entries_of for name, value in entries.items() if is_of_media(name, value)}
    kinds = [
        {name: _kind(name, media.get(name) if value is None else value) for name, value in {**media, **entries}.items()}
        for entries in entries_of
    ]
    for group, other in enumerate(kinds):
        if other != kinds[0]:
            raise SequenceParallelError(
                f"preflight: the first batches of data-parallel groups 0 and {group} cannot be joined into the one that a single device would "
                f"train on: cut to {first.rows} x {first.tokens} tokens they hold {kinds[0]} and {other}; make the loader give all groups "
                "the same entries, or preflight=False trains without the check"
            )
    if 0 in dims.values():
        raise SequenceParallelError(
            f"preflight: the batches of {len(crops)} data-parallel groups cannot be joined: {[n for n, d in dims.items() if d == 0]} carry the "
            "sequence along dim 0 and have no rows; put the rows first, or preflight=False trains without the check"
        )
    joined = {
        name: _join(
            [entries[name] for entries in entries_of if name not in media or is_of_media(name, entries.get(name))],
            dims.get(name),
            rows_each.get(name, 1) * first.rows,
            of_media=name in media,
        )
        for name in {**entries_of[0], **media}
    }
    counts = [crop.num_targets for crop in crops if crop.num_targets is not None]
    targets = sum(counts) if len(counts) == len(crops) else None
    return Crop(
        batch=rebuild_plain(first.batch, joined),
        rows=first.rows * len(crops),
        tokens=first.tokens,
        num_targets=targets,
    )


def _kind(name: str, value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    # Groups may have other numbers of images.
    return f"{value.dtype} {('any', *value.shape[1:]) if is_of_media(name, value) else tuple(value.shape)}"


def _join(values: list[Any], dim: int | None, rows: int, *, of_media: bool) -> Any:
    if dim is not None and values[0].shape[0] == 1:  # one row for all, as position_ids may be
        values = [value.expand(rows, *value.shape[1:]) for value in values]
    if not of_media and not all(has_rows(value, dim, rows) for value in values):
        return values[0]
    if isinstance(values[0], Tensor):
        return torch.cat(values)
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values)
    joined = [each for value in values for each in value]
    return tuple(joined) if isinstance(values[0], tuple) else joined
