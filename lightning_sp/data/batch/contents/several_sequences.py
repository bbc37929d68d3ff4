"""Sequences that stand beside each other in a batch, told by names around the standard ones: each is read for itself.

    chosen_input_ids, chosen_attention_mask, chosen_labels            (B, 17)     one
    rejected_input_ids, rejected_attention_mask, rejected_labels      (B, 31)     another
    input_ids_chosen, attention_mask_chosen, ...                      likewise

Attention of a step that sees its rank's part tells sequences by their numbers of tokens, so such a step has one length, or an encoder's and a
decoder's. A step that sees whole sequences has any number of them, each with as many rows as it needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_sp.data.batch.contents.entries import (
    DECODER,
    INPUTS,
    OF_TARGETS,
    STANDARD_NAMES,
    extent,
    inputs_of_whole_encoder,
    named_dims,
    pairs_of_tokens,
    sequence_dims,
    shapes_of,
    split_sequences,
)
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError


@dataclass(frozen=True, kw_only=True)
class Named:
    """What stands around the standard names of a sequence's entries.

    Args:
        before: of a name.
        after: likewise.
    """

    before: str = ""
    after: str = ""

    def __call__(self, standard: str) -> str:
        """Return a standard name as this sequence's entry has it."""
        return f"{self.before}{standard}{self.after}"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A sequence beside the one that a batch is told by.

    Args:
        named: what stands around its standard names.
        dims: of its entries, along which they carry it.
        rows_each: its rows for each row of the batch: passages of a question, say.
    """

    named: Named
    dims: Mapping[str, int]
    rows_each: int


@dataclass(frozen=True, kw_only=True)
class BatchSequences:
    """The sequences of a whole batch.

    Args:
        own: dims of the one that is trained on, a decoder's where there is an encoder's.
        named: what stands around its standard names.
        encoder: dims of the encoder's; empty where there is none.
        whole_inputs: what an encoder reads whole, see `inputs_of_whole_encoder`.
        beside: the others.
        pairs: entries of pairs of tokens, see `pairs_of_tokens`.
        whole: entries that are known to be none, see `ShardOptions`.
    """

    own: Mapping[str, int]
    named: Named = Named()
    encoder: Mapping[str, int] = field(default_factory=dict)
    whole_inputs: Sequence[str] = ()
    beside: Sequence[Beside] = ()
    pairs: Sequence[str] = ()
    whole: Collection[str] = ()

    @property
    def dims(self) -> dict[str, int]:
        """Of all entries that carry a sequence."""
        of_others = {name: dim for each in self.beside for name, dim in each.dims.items()}
        return {**self.encoder, **self.own, **of_others}

    def others(self, dims: Mapping[str, int]) -> list[str]:
        """Return the entries that are known beside those of one sequence."""
        return [name for name in (*self.dims, *self.whole_inputs, *self.pairs, *self.whole) if name not in dims]


def batch_sequences(entries: Mapping[str, Any], options: ShardOptions) -> BatchSequences:
    """Return the sequences of a whole batch.

    Raises:
        SequenceParallelError: as `sequence_dims` and `split_sequences`; several of different lengths where a step sees its rank's part.
    """
    found = _by_names(entries, options)
    if len(found) > 1 and options.global_view:
        return _beside_each_other(entries, named_dims(entries, options), found, options)
    dims = sequence_dims(entries, options)
    whole_inputs = inputs_of_whole_encoder(entries, options)
    if len(found) > 1:
        _check_one_length(entries, found)
    own, encoder = split_sequences(dims, whole_inputs)
    named = Named(before=DECODER) if encoder or whole_inputs else Named()
    if options.global_view and not encoder and not whole_inputs:
        own, encoder = _by_lengths(entries, own)
        named = Named(before=DECODER) if encoder else Named()
    if options.global_view and encoder:
        encoder |= _of_encoder(entries, dims, encoder)
    pairs = [name for name in pairs_of_tokens(entries, dims, options) if name not in whole_inputs]
    return BatchSequences(
        own=own, named=named, encoder=encoder, whole_inputs=whole_inputs, pairs=pairs, whole=options.whole_entries
    )


def _of_encoder(entries: Mapping[str, Any], dims: Mapping[str, int], encoder: Mapping[str, int]) -> dict[str, int]:
    """Return the dims of entries of other names that are as long as an encoder's sequence, boxes of its tokens say: a decoder's say so.

    For a step that sees whole sequences, which is exact whichever it is.
    """
    rows, length = extent(entries, encoder, entries)
    others = {n: t for n, t in entries.items() if n not in dims and n not in STANDARD_NAMES and isinstance(t, Tensor)}
    return {
        name: 1
        for name, each in others.items()
        if not name.startswith(DECODER) and tuple(each.shape[:2]) == (rows, length) and length not in each.shape[2:]
    }


def _by_names(entries: Mapping[str, Any], options: ShardOptions) -> dict[Named, dict[str, int]]:
    """Return the sequences of names around the standard ones, each with its inputs; none beside a decoder's, which is told otherwise."""
    if any(name.startswith(DECODER) for name in entries):
        return {}
    found: dict[Named, dict[str, int]] = defaultdict(dict)
    for name, value in entries.items():
        told = _told(name)
        if told is None or not isinstance(value, Tensor):
            continue
        named, standard = told
        dim = options.sequence_dims.get(name, STANDARD_NAMES[standard][0])
        if value.dim() > dim and not (standard.endswith("attention_mask") and value.dim() == 4):
            found[named][name] = dim
    return {
        named: dims for named, dims in found.items() if not {named(standard) for standard in INPUTS}.isdisjoint(dims)
    }


def _told(name: str) -> tuple[Named, str] | None:
    """Return what stands around the standard name in a name, and that; None where there is none, or nothing around it."""
    if name in STANDARD_NAMES:
        return None
    for standard in sorted(STANDARD_NAMES, key=len, reverse=True):
        if name.endswith((f"_{standard}", f".{standard}")):
            return Named(before=name.removesuffix(standard)), standard
        if name.startswith(f"{standard}_"):
            return Named(after=name.removeprefix(standard)), standard
    return None


def _check_one_length(entries: Mapping[str, Any], found: Mapping[Named, Mapping[str, int]]) -> None:
    lengths = {name: int(entries[name].shape[dim]) for dims in found.values() for name, dim in dims.items()}
    if len(set(lengths.values())) > 1:
        raise SequenceParallelError(
            f"the batch holds {len(found)} sequences of different lengths, {lengths}: a step that sees its rank's part tells them by "
            "their numbers of tokens, and has one length; global_view=True carries them, or pad them to one length"
        )


def _beside_each_other(
    entries: Mapping[str, Any],
    dims: Mapping[str, int],
    found: Mapping[Named, Mapping[str, int]],
    options: ShardOptions,
) -> BatchSequences:
    """Return those of names around the standard ones, beside the standard ones' or the first of them."""
    of_found = {name for each in found.values() for name in each}
    rest = {name: dim for name, dim in dims.items() if name not in of_found}
    sequences = {named: dict(each) for named, each in found.items()}
    if not rest.keys().isdisjoint(INPUTS):
        own, named = rest, Named()
    else:
        # Labels, say, of one of them: whichever has as many tokens.
        named = next((n for n, each in sequences.items() if _is_as_long(entries, rest, each)), next(iter(sequences)))
        own = {**sequences.pop(named), **rest}
    pairs = pairs_of_tokens(
        entries, {**dims, **{name: dim for each in found.values() for name, dim in each.items()}}, options
    )
    rows, _ = extent(entries, own, [*of_found, *pairs, *options.whole_entries])
    beside = [_beside(entries, n, each, rows) for n, each in sequences.items()]
    return BatchSequences(own=own, named=named, beside=beside, pairs=pairs, whole=options.whole_entries)


def _beside(entries: Mapping[str, Any], named: Named, dims: Mapping[str, int], rows: int) -> Beside:
    own_rows, _ = extent(entries, dims, entries)
    if own_rows % rows:
        raise SequenceParallelError(
            f"the batch has {rows} rows of one sequence and {own_rows} of another, {', '.join(dims)}: it must have equally many for each row "
            f"of the first; it holds {shapes_of(entries)}"
        )
    return Beside(named=named, dims=dims, rows_each=own_rows // rows)


def _is_as_long(entries: Mapping[str, Any], rest: Mapping[str, int], dims: Mapping[str, int]) -> bool:
    lengths = [{int(entries[name].shape[dim]) for name, dim in each.items()} for each in (rest, dims)]
    return bool(lengths[0] & lengths[1])


def _by_lengths(entries: Mapping[str, Any], own: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return a decoder's sequence and its encoder's where no name tells them: labels of another length than the inputs are the decoder's.

    Its model makes its decoder's inputs of them.
    """
    lengths = {n: int(entries[n].shape[d]) for n, d in own.items()}
    labels = {n: d for n, d in own.items() if n in OF_TARGETS}
    inputs = {n: d for n, d in own.items() if n not in labels}
    of_labels, of_inputs = {lengths[n] for n in labels}, {lengths[n] for n in inputs}
    if len(of_labels) != 1 or len(of_inputs) != 1 or of_labels == of_inputs:
        return own, {}
    return labels, inputs
