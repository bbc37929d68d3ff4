"""Sharding a batch: which tensors carry the sequence, the global positions they get, and the way back.

Labels are shifted on the whole sequence, then sharded: a shard's last target is the next shard's first token. Whether labels are shifted
is declared or known by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.balanced_layout import balanced_layout
from lightning_sp.data.batch.entries import (
    DECODER,
    STANDARD_NAMES,
    batch_entries,
    extent,
    sequence_dims,
    shapes_of,
    split_sequences,
)
from lightning_sp.data.batch.labels import shifted_labels
from lightning_sp.data.batch.packed_documents import document_boundaries, pad_boundaries, read_position_ids
from lightning_sp.data.batch.padding import check_padding, visible_keys
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharded_batch import rebuild
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout, merge, pad, shard


def shard_batch(batch: Any, layout: SequenceLayout, rank: int, options: ShardOptions) -> tuple[Any, SequenceInfo]:
    """Return this rank's part of a whole batch, and what was whole.

    Args:
        batch: a mapping, tuple or list of tensors; tensors without the sequence pass as they are.
        layout: the degrees, and the layout itself unless `options.balance` asks for one of the batch's documents: see the second result's.
        rank: this rank's place among those that share the sequence.
        options: names, dims and labels.

    Shapes: (B, S, ...) -> (B, padded S / layout.size, ...) for each tensor that carries the sequence.
    Communicates: nothing.

    Raises:
        SequenceParallelError: no sequence found, lengths that differ, labels of unknown shift, a mask that hides tokens.
    """
    entries = batch_entries(batch, options)
    dims = sequence_dims(entries, options)
    own, encoder = split_sequences(dims)
    local, info = _shard_sequence(
        entries, own, layout, rank, options, prefix=DECODER if encoder else "", others=encoder
    )
    if encoder:
        of_encoder, read = _shard_sequence(entries, encoder, layout, rank, options, others=own, decoder=info)
        if read.rows != info.rows:
            raise SequenceParallelError(
                f"the batch has {read.rows} rows of the encoder and {info.rows} of the decoder: it holds {shapes_of(entries)}"
            )
        local, info = {**of_encoder, **local}, replace(info, encoder=read)
    given = {n: t for n, t in entries.items() if n not in dims}
    if not isinstance(batch, Mapping):
        return rebuild(batch, {n: local.get(n, t) for n, t in entries.items()}), info
    if options.decoder_inputs is not None:  # a model that is handed its positions, and may not take them by name
        local = {n: t for n, t in local.items() if n in dims}
    elif info.shift_labels is not None and options.model_shifts_labels and not encoder:
        local["shift_labels"] = info.shift_labels
    return rebuild(batch, {**given, **local}), info


def _shard_sequence(
    entries: Mapping[str, Any],
    dims: Mapping[str, int],
    layout: SequenceLayout,
    rank: int,
    options: ShardOptions,
    *,
    prefix: str = "",
    others: Mapping[str, int],
    decoder: SequenceInfo | None = None,
) -> tuple[dict[str, Tensor], SequenceInfo]:
    """Return this rank's part of one sequence, its positions with it, and what was whole.

    Args:
        entries: of the batch.
        dims: of this sequence.
        layout: as of `shard_batch`.
        rank: likewise.
        options: likewise.
        prefix: of the names of its positions and its mask.
        others: dims of the batch's other sequence.
        decoder: of an encoder's: what its tokens must be told apart from, by their number on each rank.
    """
    rows, length = extent(entries, dims, others)
    padded = layout.padded_length(length)
    places, masked = f"{prefix}position_ids", f"{prefix}attention_mask"
    position_ids, given = read_position_ids(entries.get(places), rows, length)
    mask_given = masked in dims
    valid, seen = visible_keys(entries[masked]) if mask_given else (None, None)
    if decoder is not None and options.apart and padded == decoder.padded_length:
        # By what the batch holds and not by its values: those of data-parallel groups and of later batches are others.
        alike = length == decoder.length and not mask_given and not decoder.has_attention_mask
        padded += 0 if alike else layout.multiple
    boundaries = document_boundaries(position_ids, options, entries.get(masked) is not None) if given else None
    if boundaries is not None and others:
        raise SequenceParallelError(
            f"{places} of an encoder-decoder batch do not rise by one: packed documents are carried for one sequence alone; give each row one "
            "document, or packed_documents=False if attention is to see the whole row"
        )
    # Labels are of the sequence that is trained on.
    labels = None if decoder is not None else shifted_labels(entries, options)
    if padded > length:
        boundaries = pad_boundaries(boundaries, padded)
        position_ids = torch.cat([position_ids, torch.arange(padded - length).expand(rows, -1)], 1)
        check_padding(dims, layout, length, padded, apart=padded > layout.padded_length(length))
    found = balanced_layout(boundaries, valid, layout, padded, options)
    layout = layout if found is None else found.layout

    def cut(name: str, tensor: Tensor, dim: int) -> Tensor:
        value = STANDARD_NAMES.get(name, (dim, 0))[1]
        return shard(pad(tensor, padded, dim=dim, value=value), layout, rank, dim=dim)

    local = {n: cut(n, entries[n], dim) for n, dim in dims.items() if n != places}
    local[places] = shard(position_ids, layout, rank, dim=1)
    local_labels = None if labels is None else cut("shift_labels", labels, 1)
    return local, SequenceInfo(
        rows=rows,
        length=length,
        padded_length=padded,
        boundaries=boundaries,
        position_ids=local[places],
        shift_labels=local_labels,
        attention_mask=local[masked] if mask_given else None,
        valid=valid,
        visible_keys=seen,
        layout=layout,
        balance=found,
    )


def unshard(
    tensor: Tensor, layout: SequenceLayout, group: ProcessGroup | None, *, dim: int = 1, length: int | None = None
) -> Tensor:
    """Return the whole sequences from every rank's part, in global order, without the padding. The same on all ranks.

    Args:
        tensor: this rank's part.
        layout: the degrees.
        group: the ranks that share the sequence.
        dim: dimension of the sequence.
        length: tokens before padding; None keeps all.

    Shapes: (..., s, ...) -> (..., length, ...). Communicates: one all_gather over the sequence's ranks.
    """
    whole = merge(comm.gather(tensor, group), layout, dim=dim)
    return whole if length is None else whole.narrow(dim, 0, length)
