"""One sequence of a batch -> this rank's part of it, with its global positions.

Everything is read from the whole sequence: its documents, the keys that its mask leaves visible, its labels. Then it is padded to a length that
the degrees divide, and cut by the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_sp.context.sequence import SequenceInfo, versioned
from lightning_sp.data.batch.balanced_layout import balanced_layout
from lightning_sp.data.batch.contents.entries import STANDARD_NAMES, extent
from lightning_sp.data.batch.contents.several_sequences import Named
from lightning_sp.data.batch.packed_documents import document_boundaries, pad_boundaries, read_position_ids
from lightning_sp.data.batch.padding import VisibleKeys, check_padding, read_visible_keys
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.labels import IGNORE_INDEX, can_be_ignored
from lightning_sp.layout import SequenceLayout, pad, shard


@dataclass(frozen=True, kw_only=True)
class BatchSequence:
    """One of the sequences that a whole batch holds.

    Args:
        entries: all of the batch, by name.
        dims: those of this sequence, with the dimension along which each carries it.
        others: entries of the batch's other sequences, or what its encoder reads whole; empty where it holds one.
        named: what stands around its standard names.
        targets: of each of its positions, (B, S); None where it has none.
    """

    entries: Mapping[str, Any]
    dims: Mapping[str, int]
    others: Sequence[str] = ()
    named: Named = field(default_factory=Named)
    targets: Tensor | None = None

    @property
    def positions_name(self) -> str:
        """The entry of its positions."""
        return self.named("position_ids")

    @property
    def mask_name(self) -> str:
        """The entry of its padding mask."""
        return self.named("attention_mask")

    @property
    def attention_mask(self) -> Tensor | None:
        """Its padding mask; a mask of queries and keys is none."""
        return self.entries[self.mask_name] if self.mask_name in self.dims else None


def shard_sequence(
    sequence: BatchSequence,
    layout: SequenceLayout,
    rank: int,
    options: ShardOptions,
    *,
    decoder: SequenceInfo | None = None,
) -> tuple[dict[str, Tensor], SequenceInfo]:
    """Return this rank's part of one sequence, its positions with it, and what was whole.

    Args:
        sequence: of a whole batch.
        layout: as of `shard_batch`.
        rank: likewise.
        options: likewise.
        decoder: given for an encoder's sequence, which must be told apart from it by the number of its tokens.
    """
    entries, mask = sequence.entries, sequence.attention_mask
    rows, length = extent(entries, sequence.dims, sequence.others)
    position_ids, given = read_position_ids(entries.get(sequence.positions_name), rows, length)
    dim = sequence.dims.get(sequence.mask_name, 1)
    visible = VisibleKeys() if mask is None else read_visible_keys(mask, dim, global_view=options.global_view)
    boundaries = _read_documents(sequence, position_ids, options) if given else None
    padded = _padded_length(sequence, length, layout, options, decoder)
    if padded > length:
        boundaries = pad_boundaries(boundaries, padded)
        position_ids = torch.cat([position_ids, torch.arange(padded - length).expand(rows, -1)], 1)
        dims = {} if options.global_view else sequence.dims
        check_padding(dims, layout, length, padded, apart=padded > layout.padded_length(length))
    balance = balanced_layout(boundaries, visible.run, layout, padded, options)
    layout = layout if balance is None else balance.layout

    def cut(name: str, tensor: Tensor, dim: int) -> Tensor:
        value = STANDARD_NAMES.get(name, (dim, 0))[1]
        if value == IGNORE_INDEX and not options.global_view:
            tensor = can_be_ignored(tensor)
        filled = _repeated if options.global_view else partial(pad, value=value)
        return shard(filled(tensor, padded, dim=dim), layout, rank, dim=dim)

    local = {n: cut(n, entries[n], dim) for n, dim in sequence.dims.items() if n != sequence.positions_name}
    local[sequence.positions_name] = shard(position_ids, layout, rank, dim=1)
    local_labels = None if sequence.targets is None else cut("shift_labels", sequence.targets, 1)
    own_mask = None if mask is None or mask.dim() != 2 else local[sequence.mask_name]
    return local, SequenceInfo(
        rows=rows,
        length=length,
        padded_length=padded,
        boundaries=boundaries,
        position_ids=local[sequence.positions_name],
        positions_given=given,
        documents_declared=options.packed_documents is True,
        shift_labels=local_labels,
        attention_mask=None if own_mask is None else own_mask != 0,
        mask_in_batch=None if own_mask is None else versioned(own_mask),
        valid=visible.run,
        visible_keys=visible.each,
        layout=layout,
        balance=balance,
        dims=sequence.dims,
    )


def _repeated(tensor: Tensor, length: int, *, dim: int) -> Tensor:
    """Pad with the last token: what a step makes of padding is then as finite as what it makes of that."""
    tokens = torch.arange(length, device=tensor.device).clamp(max=tensor.shape[dim] - 1)
    return tensor if tensor.shape[dim] in (0, length) else tensor.index_select(dim, tokens)


def _padded_length(
    sequence: BatchSequence, length: int, layout: SequenceLayout, options: ShardOptions, decoder: SequenceInfo | None
) -> int:
    """Return the length that the degrees divide: for an encoder one step more where it would be taken for its decoder."""
    padded = layout.padded_length(length)
    if decoder is None or not options.apart or padded != decoder.padded_length:
        return padded
    # By what the batch holds and not by its values: those of data-parallel groups and of later batches are others.
    alike = length == decoder.length and sequence.attention_mask is None and not decoder.has_attention_mask
    return padded if alike else padded + layout.multiple


def _read_documents(sequence: BatchSequence, position_ids: Tensor, options: ShardOptions) -> Tensor | None:
    mask_given = sequence.entries.get(sequence.mask_name) is not None
    boundaries = document_boundaries(position_ids, options, mask_given)
    if boundaries is not None and sequence.others:
        raise SequenceParallelError(
            f"{sequence.positions_name} of a batch of several sequences do not rise by one: packed documents are carried for one sequence "
            "alone; give each row one document, or packed_documents=False if attention is to see the whole row"
        )
    return boundaries
