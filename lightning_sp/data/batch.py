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
from lightning_sp.attention.plan.balance import Balance, balance
from lightning_sp.attention.spec.documents import boundaries_from_positions
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.context.batch import BatchInfo
from lightning_sp.data.names import (
    DECODER,
    SHIFTED_BY_NAME,
    STANDARD_NAMES,
    ShardOptions,
    batch_entries,
    extent,
    plain_entries,
    sequence_dims,
    shapes_of,
    shifted_labels,
    split_sequences,
)
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout, merge, pad, positions, shard

# What the busiest rank may compute above the mean before `balance="auto"` leaves zigzag.
UNBALANCED = 0.05


class ShardedBatch(dict[str, Any]):
    """A batch that holds this rank's part of its sequences. The type is the mark: it is never sharded twice."""


def shard_batch(batch: Any, layout: SequenceLayout, rank: int, options: ShardOptions) -> tuple[Any, BatchInfo]:
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
        return _rebuild(batch, {n: local.get(n, t) for n, t in entries.items()}), info
    if options.decoder_inputs is not None:  # a model that is handed its positions, and may not take them by name
        local = {n: t for n, t in local.items() if n in dims}
    elif info.shift_labels is not None and options.model_shifts_labels and not encoder:
        local["shift_labels"] = info.shift_labels
    return _rebuild(batch, {**given, **local}), info


def _shard_sequence(
    entries: Mapping[str, Any],
    dims: Mapping[str, int],
    layout: SequenceLayout,
    rank: int,
    options: ShardOptions,
    *,
    prefix: str = "",
    others: Mapping[str, int],
    decoder: BatchInfo | None = None,
) -> tuple[dict[str, Tensor], BatchInfo]:
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
    position_ids, given = _position_ids(entries.get(places), rows, length)
    mask_given = masked in dims
    valid, seen = _valid_keys(entries[masked]) if mask_given else (None, None)
    if decoder is not None and options.apart and padded == decoder.padded_length:
        # By what the batch holds and not by its values: those of data-parallel groups and of later batches are others.
        alike = length == decoder.length and not mask_given and not decoder.mask_given
        padded += 0 if alike else layout.multiple
    boundaries = _documents(position_ids, options, entries.get(masked) is not None) if given else None
    if boundaries is not None and others:
        raise SequenceParallelError(
            f"{places} of an encoder-decoder batch do not rise by one: packed documents are carried for one sequence alone; give each row one "
            "document, or packed_documents=False if attention is to see the whole row"
        )
    # Labels are of the sequence that is trained on.
    labels = None if decoder is not None else shifted_labels(entries, options)
    if padded > length:
        boundaries = _pad_boundaries(boundaries, padded)
        position_ids = torch.cat([position_ids, torch.arange(padded - length).expand(rows, -1)], 1)
        _check_padding(dims, layout, length, padded, apart=padded > layout.padded_length(length))
    found = _balance(boundaries, valid, layout, padded, options)
    layout = layout if found is None else found.layout

    def cut(name: str, tensor: Tensor, dim: int) -> Tensor:
        value = STANDARD_NAMES.get(name, (dim, 0))[1]
        return shard(pad(tensor, padded, dim=dim, value=value), layout, rank, dim=dim)

    local = {n: cut(n, entries[n], dim) for n, dim in dims.items() if n != places}
    local[places] = shard(position_ids, layout, rank, dim=1)
    local_labels = None if labels is None else cut("shift_labels", labels, 1)
    return local, BatchInfo(
        rows,
        length,
        padded,
        boundaries,
        local[places],
        local_labels,
        valid,
        mask_given,
        local[masked] if mask_given else None,
        layout,
        found,
        seen,
    )


def is_sharded(batch: Any) -> bool:
    """Return whether a batch already holds one rank's part of its sequences."""
    return isinstance(batch, ShardedBatch) or (
        isinstance(batch, (tuple, list)) and any(getattr(t, "_lightning_sp_sharded", False) for t in batch)
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


def _rebuild(batch: Any, local: dict[str, Any]) -> Any:
    if isinstance(batch, Mapping):
        return ShardedBatch(local)
    for value in local.values():
        if isinstance(value, Tensor):
            value._lightning_sp_sharded = True  # type: ignore[attr-defined]
    if isinstance(batch, Tensor):
        return local["input_ids"]
    values = list(local.values())
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _position_ids(given: Tensor | None, rows: int, length: int) -> tuple[Tensor, bool]:
    if given is None:
        return torch.arange(length).expand(rows, length), False
    if given.dim() != 2:
        raise SequenceParallelError(f"position_ids of shape {tuple(given.shape)}: must be (batch, tokens)")
    return given.expand(rows, length), True


def _documents(position_ids: Tensor, options: ShardOptions, mask_given: bool) -> Tensor | None:
    """Return the boundaries of packed documents, where positions that do not rise by one are known to mean them."""
    boundaries = boundaries_from_positions(position_ids)
    packed = options.packed_documents
    if packed is None and options.model_shifts_labels and not mask_given:
        packed = True  # Hugging Face's convention; given a mask, its models go by that alone
    if boundaries is None or packed:
        return boundaries
    if packed is None:
        row = int((boundaries[:, 1] < boundaries[:, -1]).nonzero()[0])
        at = int(boundaries[row, 1])
        raise SequenceParallelError(
            f"position_ids do not rise by one: row {row} goes from {int(position_ids[row, at - 1])} to {int(position_ids[row, at])} at token "
            f"{at}, and nothing says whether that begins another document: pass packed_documents=True to keep attention within documents, or "
            "packed_documents=False to attend to the whole row whatever its positions are, as scaled_dot_product_attention does on one device"
        )
    return None


def _valid_keys(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return what each row's padding mask leaves: the run of tokens, or every token by itself where it is no run; neither where it hides none.

    Shapes: (B, S) -> (B, 2), int64 on the CPU, or (B, S), bool.

    Raises:
        SequenceParallelError: the mask is not one of tokens.
    """
    if mask.dim() != 2:
        raise SequenceParallelError(
            f"attention_mask of shape {tuple(mask.shape)}: must be (batch, tokens); a mask of queries and keys goes under another name, whole"
        )
    left = mask.cpu() != 0
    if bool(left.all()):
        return None, None
    counts = left.sum(1)
    start = left.long().argmax(1)
    valid = torch.stack([start, start + counts], 1)
    tokens = torch.arange(mask.shape[1])
    holes = ((valid[:, :1] <= tokens) & (tokens < valid[:, 1:])) != left
    return (None, left) if bool(holes.any()) else (valid, None)


def _pad_boundaries(boundaries: Tensor | None, padded: int) -> Tensor | None:
    """Make the padding a document of its own, so that it takes no part in attention."""
    if boundaries is None:
        return None
    return torch.cat([boundaries, torch.full((boundaries.shape[0], 1), padded)], 1)


def _balance(
    boundaries: Tensor | None, valid: Tensor | None, layout: SequenceLayout, padded: int, options: ShardOptions
) -> Balance | None:
    """Return the layout to use for a batch's documents; None where none are known, or zigzag is wanted."""
    if options.balance == "zigzag" or boundaries is None or layout.ring_size == 1:
        return None
    kinds = options.attention or ((True, (None, None), None, False),)
    masks = {
        kind: AttentionMask(kind[0], boundaries, kind[1], kind[2], valid if kind[3] else None)
        for kind in dict.fromkeys(kinds)
    }
    found = balance([masks[kind] for kind in kinds], layout, padded, device=options.device)
    if options.balance == "auto" and not (found.pays and found.zigzag_imbalance > UNBALANCED):
        return replace(found, layout=layout)
    return found


def _check_padding(dims: Mapping[str, int], layout: SequenceLayout, length: int, padded: int, *, apart: bool) -> None:
    unknown = [n for n in dims if n not in STANDARD_NAMES]
    if unknown and apart:
        raise SequenceParallelError(
            f"the batch's two sequences would both have {layout.padded_length(length)} tokens, by whose number attention tells them apart where "
            f"their masks differ, and what {layout.multiple} tokens of padding more mean is not known for {unknown}: make one of them longer by "
            f"{layout.multiple} tokens, or use standard names"
        )
    if unknown:
        raise SequenceParallelError(
            f"sequences of {length} tokens need {padded - length} of padding to be a multiple of {layout.multiple} "
            f"(ring {layout.ring_size} x ulysses {layout.ulysses_size}), but what padding means is not known for {unknown}; "
            f"make the length a multiple of {layout.multiple}, or use standard names"
        )


def digest(batch: Any) -> int:
    """Return a number that differs, almost surely, between different batches: for the check that a group's ranks read the same."""
    total = 0
    for index, value in enumerate(plain_entries(batch).values()):
        if isinstance(value, Tensor) and value.numel():
            flat = value.detach().reshape(-1)
            bits = flat.to(torch.int64) if not flat.is_floating_point() else flat.double().view(torch.int64)
            weights = torch.arange(1, bits.numel() + 1, dtype=torch.int64, device=bits.device)
            total ^= int((bits * (weights * 2654435761 + 97 * (index + 1))).sum().item())
    return total & 0x7FFFFFFFFFFFFFFF


def check_hand_sharded(info_length: int, layout: SequenceLayout) -> None:
    """Refuse a hand-sharded batch whose global length the degrees do not divide."""
    if info_length % layout.multiple:
        raise SequenceParallelError(
            f"a hand-sharded length of {info_length} tokens is no multiple of {layout.multiple}"
        )


def hand_sharded_info(batch: Any, layout: SequenceLayout, rank: int, options: ShardOptions) -> BatchInfo:
    """Return what is whole about a batch that was sharded by hand in this layout, from its local position_ids or as one document."""
    entries = plain_entries(batch)
    dims, encoder = split_sequences(sequence_dims(entries, options))
    if encoder:
        raise SequenceParallelError(
            f"shard_batch=False: the batch holds {', '.join(encoder)} of an encoder and {', '.join(dims)} of a decoder: an encoder-decoder "
            "batch cannot be sharded by hand; leave shard_batch=True and return whole sequences"
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
    labels = next((entries[n] for n in SHIFTED_BY_NAME if isinstance(entries.get(n), Tensor)), None)
    return BatchInfo(rows, length, length, None, expected, labels, layout=layout)
