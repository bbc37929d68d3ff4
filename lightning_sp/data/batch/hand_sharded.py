"""Batches that the user's loader has sharded already (shard_batch=False): what was whole about them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.contents.entries import (
    extent,
    inputs_of_whole_encoder,
    plain_entries,
    sequence_dims,
    split_sequences,
)
from lightning_sp.data.batch.contents.targets import TARGET_NAMES
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout, positions


def check_hand_sharded(info_length: int, layout: SequenceLayout) -> None:
    """Refuse a hand-sharded batch whose global length the degrees do not divide."""
    if info_length % layout.multiple:
        raise SequenceParallelError(
            f"a hand-sharded length of {info_length} tokens is no multiple of {layout.multiple} (ring {layout.ring_size} x ulysses "
            f"{layout.ulysses_size}): pad the whole sequence to {layout.padded_length(info_length)} tokens before shard_sequence, or leave "
            "shard_batch=True, which pads"
        )


def hand_sharded_info(batch: Any, layout: SequenceLayout, rank: int, options: ShardOptions) -> SequenceInfo:
    """Return what is whole about a batch that was sharded by hand in this layout, from its local position_ids or as one document."""
    entries = plain_entries(batch)
    whole_inputs = inputs_of_whole_encoder(entries, options)
    dims, encoder = split_sequences(sequence_dims(entries, options), whole_inputs)
    if encoder or whole_inputs:
        raise SequenceParallelError(
            f"shard_batch=False: the batch holds {', '.join(encoder or whole_inputs)} of an encoder and {', '.join(dims)} of a decoder: an "
            "encoder-decoder batch cannot be sharded by hand; leave shard_batch=True and return whole sequences"
        )
    rows, local = extent(entries, dims)
    length = local * layout.size
    check_hand_sharded(length, layout)
    given = entries.get("position_ids")
    expected = positions(layout, length, rank).expand(rows, local)
    if isinstance(given, Tensor) and not bool((given.cpu() == expected).all()):
        raise SequenceParallelError(
            f"shard_batch=False: position_ids of rank {rank} are not the global positions of this layout (ring {layout.ring_size} x ulysses "
            f"{layout.ulysses_size}); packed documents cannot be sharded by hand; use lightning_sp.layout.shard on the whole tensors"
        )
    labels = next((entries[n] for n in TARGET_NAMES if isinstance(entries.get(n), Tensor)), None)
    return SequenceInfo(
        rows=rows,
        length=length,
        padded_length=length,
        boundaries=None,
        position_ids=expected,
        positions_given=isinstance(given, Tensor),
        shift_labels=labels,
        layout=layout,
    )
