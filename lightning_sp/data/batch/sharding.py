"""Sharding a whole batch into each rank's part, and the way back.

Labels are shifted on the whole sequence, then sharded: a shard's last target is the next shard's first token. Whether labels are shifted
is declared or known by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.contents.entries import (
    batch_entries,
    is_no_structure,
    plain_entries,
    sequence_dims,
    shapes_of,
)
from lightning_sp.data.batch.contents.media import is_of_media
from lightning_sp.data.batch.contents.several_sequences import Named, batch_sequences
from lightning_sp.data.batch.contents.targets import batch_targets
from lightning_sp.data.batch.contents.virtual_tokens import make_room
from lightning_sp.data.batch.contents.without_sequence import holds_no_sequence, holds_rows_alone, without_sequence
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.shard_sequence import BatchSequence, shard_sequence
from lightning_sp.data.batch.sharded_batch import rebuild
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout, merge


def shard_batch(batch: Any, layout: SequenceLayout, rank: int, options: ShardOptions) -> tuple[Any, SequenceInfo]:
    """Return this rank's part of a whole batch, and what was whole.

    Args:
        batch: a mapping, tuple or list of tensors; tensors without the sequence pass as they are. So does a batch
            without one, on every rank, and anything else where no sequence is split.
        layout: the degrees, and the layout unless `options.balance` asks for one that suits the batch's documents: the second result has it.
        rank: this rank's among those that share the sequence.
        options: names, dims and labels.

    Shapes: (B, S, ...) -> (B, padded S / layout.size, ...) for each tensor that carries the sequence.
    Communicates: nothing.

    Raises:
        SequenceParallelError: no sequence found, lengths that differ, labels of unknown shift, a mask that hides tokens.
    """
    if layout.size == 1 and is_no_structure(batch):
        return batch, replace(without_sequence({}), is_whole=False)
    if holds_no_sequence(batch, options):
        return batch, without_sequence(batch)
    entries = batch_entries(batch, options)
    if layout.size == 1 and holds_rows_alone(entries, options):
        return batch, replace(without_sequence(entries), is_whole=False)
    if options.virtual_tokens:
        entries = make_room(entries, sequence_dims(entries, options), options)
    found = batch_sequences(entries, options)
    whole_inputs = found.whole_inputs

    def part(dims: Mapping[str, int], named: Named, **more: Any) -> tuple[dict[str, Tensor], SequenceInfo]:
        targets = batch_targets(entries, dims, options) if dims is found.own else None
        sequence = BatchSequence(entries=entries, dims=dims, others=found.others(dims), named=named, targets=targets)
        return shard_sequence(sequence, layout, rank, options, **more)

    local, info = part(found.own, found.named)
    if found.encoder:
        local_encoder, encoder_info = part(found.encoder, Named(), decoder=info)
        if encoder_info.rows != info.rows:
            raise SequenceParallelError(
                f"the batch has {encoder_info.rows} rows of the encoder and {info.rows} of the decoder: it holds {shapes_of(entries)}; give "
                "both the same number of rows, the batch's samples"
            )
        local, info = {**local_encoder, **local}, replace(info, encoder=encoder_info)
    beside = [part(each.dims, each.named) for each in found.beside]
    for each, _ in beside:
        local.update(each)
    given = plain_entries(batch)
    made = {name: local[name] for name in entries if name not in given and name in local}
    info = replace(info, names=tuple(entries), made_inputs=made, beside=tuple(each for _, each in beside))
    if options.global_view:  # the rest is for models that see this rank's part
        return rebuild(batch, {n: local.get(n, t) for n, t in given.items()}), info
    dims = found.dims
    others = {n: t for n, t in entries.items() if n not in dims}
    info = replace(info, other_inputs=_other_inputs(others, info), encoder_is_whole=bool(whole_inputs))
    if not isinstance(batch, Mapping):  # what has no room for other entries
        return rebuild(batch, {n: local.get(n, t) for n, t in entries.items()}), info
    if options.decoder_inputs is not None:  # a model that is handed its positions, and may not take them by name
        local = {n: t for n, t in local.items() if n in dims}
    elif info.shift_labels is not None and options.model_shifts_labels and not (found.encoder or whole_inputs):
        local["shift_labels"] = info.shift_labels
    return rebuild(batch, {**others, **local}), info


def _other_inputs(given: Mapping[str, Any], info: SequenceInfo) -> tuple[str, ...]:
    """Return what of a batch attention to other tokens may be made of: floating point of three dims or more, and no mask of the sequence's.

    Samples of sounds have two.
    """
    lengths = {each.length for each in info.sequences}
    return tuple(
        f"{name} {tuple(value.shape)}"
        for name, value in given.items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dim() >= (2 if is_of_media(name, value) else 3)
        and value.shape[-1] not in lengths
    )


def unshard(
    tensor: Tensor, layout: SequenceLayout, group: ProcessGroup | None, *, dim: int = 1, length: int | None = None
) -> Tensor:
    """Return the whole sequences from every rank's part, in global order, without the padding: the same on all ranks, and differentiable.

    For loops without the Trainer; inside of a step `lightning_sp.reductions.unshard` knows the layout.

    Args:
        tensor: this rank's part.
        layout: the degrees.
        group: the ranks that share the sequence.
        dim: dimension of the sequence.
        length: tokens before padding; None keeps all.

    Shapes: (..., s, ...) -> (..., length, ...). Communicates: one all_gather over the sequence's ranks, in the backward
    one all_to_all.
    """
    whole = merge(comm.gather_over_ranks(tensor, group), layout, dim=dim)
    return whole if length is None else whole.narrow(dim, 0, length)
