"""Sharding a batch: which tensors carry the sequence, the global positions they get, and the way back.

Labels are shifted on the whole sequence, then sharded: a shard's last target is the next shard's first token. Whether labels are shifted
is declared or known by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.attention.balance import Balance, balance
from lightning_sp.attention.mask import AttentionMask, boundaries_from_positions
from lightning_sp.context import AttentionKind, BatchInfo
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout, merge, pad, positions, shard

IGNORE_INDEX = -100
# Standard names -> (dimension of the sequence, value of padding). Hugging Face's, nanoGPT's and torchtune's.
STANDARD_NAMES: dict[str, tuple[int, float | int]] = {
    "input_ids": (1, 0),
    "inputs_embeds": (1, 0.0),
    "tokens": (1, 0),
    "labels": (1, IGNORE_INDEX),
    "shift_labels": (1, IGNORE_INDEX),
    "targets": (1, IGNORE_INDEX),
    "position_ids": (1, 0),
    "input_pos": (1, 0),
    "attention_mask": (1, 1),
    "token_type_ids": (1, 0),
    "loss_mask": (1, 0),
}
SHIFTED_BY_NAME = ("shift_labels", "targets")
# What the busiest rank may compute above the mean before `balance="auto"` leaves zigzag.
UNBALANCED = 0.05


class ShardedBatch(dict[str, Any]):
    """A batch that holds this rank's part of its sequences. The type is the mark: it is never sharded twice."""


@dataclass(frozen=True)
class ShardOptions:
    """How to find and read the sequence in a batch; see the options of the same names in `config`.

    `device` and `attention` are what documents are balanced for: the type of device, and the layers' masks, one causal one if empty.
    """

    sequence_dims: Mapping[str, int] = field(default_factory=dict)
    labels_shifted: bool | None = None
    model_shifts_labels: bool = False
    packed_documents: bool | None = None
    balance: str = "zigzag"
    device: str = "cpu"
    attention: tuple[AttentionKind, ...] = ()


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
    entries = _entries(batch)
    dims = _sequence_dims(entries, options)
    rows, length = _extent(entries, dims)
    padded = layout.padded_length(length)
    entries = dict(entries)
    position_ids, given = _position_ids(entries, rows, length)
    mask_given = "attention_mask" in dims
    valid, seen = _valid_keys(entries["attention_mask"]) if mask_given else (None, None)
    boundaries = _documents(position_ids, options, entries.get("attention_mask") is not None) if given else None
    labels = _shifted_labels(entries, options)
    if padded > length:
        boundaries = _pad_boundaries(boundaries, padded)
        position_ids = torch.cat([position_ids, torch.arange(padded - length).expand(rows, -1)], 1)
        _check_padding(dims, layout, length, padded)
    found = _balance(boundaries, valid, layout, padded, options)
    layout = layout if found is None else found.layout

    def cut(name: str, tensor: Tensor, dim: int) -> Tensor:
        value = STANDARD_NAMES.get(name, (dim, 0))[1]
        return shard(pad(tensor, padded, dim=dim, value=value), layout, rank, dim=dim)

    local = {n: cut(n, t, dims[n]) if n in dims and n != "position_ids" else t for n, t in entries.items()}
    local_positions = shard(position_ids, layout, rank, dim=1)
    local_labels = None if labels is None else cut("shift_labels", labels, 1)
    if isinstance(batch, Mapping):
        local["position_ids"] = local_positions
        if local_labels is not None and options.model_shifts_labels:
            local["shift_labels"] = local_labels
    local_mask = local["attention_mask"] if mask_given else None
    info = BatchInfo(
        rows,
        length,
        padded,
        boundaries,
        local_positions,
        local_labels,
        valid,
        mask_given,
        local_mask,
        layout,
        found,
        seen,
    )
    return _rebuild(batch, local), info


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


def _entries(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return {str(index): value for index, value in enumerate(batch)}
    if isinstance(batch, Tensor):
        return {"input_ids": batch}
    raise SequenceParallelError(
        f"a batch of type {type(batch).__name__} cannot be sharded: it must be a mapping, tuple or list of tensors, or a tensor; "
        "return a dict from the collate function, or shard by hand and pass shard_batch=False"
    )


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


def _sequence_dims(entries: Mapping[str, Any], options: ShardOptions) -> dict[str, int]:
    known = {n: t for n, t in entries.items() if n in STANDARD_NAMES and isinstance(t, Tensor)}
    # A mask of queries and keys passes whole: the model hands it to its attention as it is.
    dims = {n: STANDARD_NAMES[n][0] for n, t in known.items() if not (n == "attention_mask" and t.dim() == 4)}
    for name, dim in options.sequence_dims.items():
        tensor = entries.get(name)
        if not isinstance(tensor, Tensor) or tensor.dim() <= dim:
            held = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise SequenceParallelError(
                f"sequence_dims[{name!r}]={dim}: the batch holds {held} there; it has {_shapes(entries)}"
            )
        dims[name] = dim
    nested = [n for n, value in entries.items() if isinstance(value, (Mapping, list, tuple)) and _holds_tensors(value)]
    if not dims and nested:
        raise SequenceParallelError(
            f"the batch holds batches of its own, {', '.join(map(repr, nested))} (several training loaders at once give those): their tokens "
            "cannot be weighed against each other; train from one loader over a torch.utils.data.ConcatDataset, or return one flat dict"
        )
    short = [n for n, d in dims.items() if entries[n].dim() <= d]
    if not dims or short:
        raise SequenceParallelError(
            f"the batch has no sequence dimension{f' in {short}' if short else ''}: it holds {_shapes(entries)}; known names are "
            f"{', '.join(STANDARD_NAMES)} with the sequence along dim 1; name others by sequence_dims={{'name': dim}} (tuples by index, "
            "{'0': 1, '1': 1}), or shard by hand and pass shard_batch=False"
        )
    return dims


def _holds_tensors(value: Any) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value
    return any(isinstance(part, Tensor) for part in parts)


def _extent(entries: Mapping[str, Any], dims: Mapping[str, int]) -> tuple[int, int]:
    lengths = {n: int(entries[n].shape[d]) for n, d in dims.items()}
    if len(set(lengths.values())) > 1:
        raise SequenceParallelError(
            f"the batch's sequences have different lengths {lengths}: they must be equal to be split alike"
        )
    name, dim = next(iter(dims.items()))
    rows = int(entries[name].shape[0]) if dim > 0 else 1
    length = lengths[name]
    others = {
        n: tuple(t.shape)
        for n, t in entries.items()
        if n not in dims
        and isinstance(t, Tensor)
        and t.dim() > 1
        and t.shape[0] == rows
        and t.shape[1] == length
        and length > 1
    }
    if others:
        raise SequenceParallelError(
            f"{others} of the batch look like sequences of {length} tokens, but their names are not known: passing them whole would be "
            f"silently wrong; say sequence_dims={{{', '.join(f'{n!r}: 1' for n in others)}}}, or rename them"
        )
    return rows, length


def _position_ids(entries: Mapping[str, Any], rows: int, length: int) -> tuple[Tensor, bool]:
    given = entries.get("position_ids")
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


def _shifted_labels(entries: Mapping[str, Any], options: ShardOptions) -> Tensor | None:
    for name in SHIFTED_BY_NAME:
        if isinstance(entries.get(name), Tensor):
            found: Tensor = entries[name]
            return found
    labels = entries.get("labels")
    if not isinstance(labels, Tensor):
        return None
    if options.labels_shifted is None and not options.model_shifts_labels:
        raise SequenceParallelError(
            "the batch has 'labels', and nothing says whether they are shifted: pass labels_shifted=True when labels[t] is the target of "
            "position t, labels_shifted=False when it is input_ids[t] (Hugging Face's convention; the model then shifts), "
            "or name them 'shift_labels'"
        )
    if options.labels_shifted:
        return labels
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]


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


def _check_padding(dims: Mapping[str, int], layout: SequenceLayout, length: int, padded: int) -> None:
    unknown = [n for n in dims if n not in STANDARD_NAMES]
    if unknown:
        raise SequenceParallelError(
            f"sequences of {length} tokens need {padded - length} of padding to be a multiple of {layout.multiple} "
            f"(ring {layout.ring_size} x ulysses {layout.ulysses_size}), but what padding means is not known for {unknown}; "
            f"make the length a multiple of {layout.multiple}, or use standard names"
        )


def _shapes(entries: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{n}: {tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__}" for n, t in entries.items()
    )


def digest(batch: Any) -> int:
    """Return a number that differs, almost surely, between different batches: for the check that a group's ranks read the same."""
    total = 0
    for index, value in enumerate(_entries(batch).values()):
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
    entries = _entries(batch)
    dims = _sequence_dims(entries, options)
    rows, local = _extent(entries, dims)
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
