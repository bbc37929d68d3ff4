"""One sequence of a sharded batch: what was whole before it was sharded, and this rank's part of what a step reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_sp.attention.plan.balance import Balance
from lightning_sp.context.dropout import DropoutSource
from lightning_sp.layout import SequenceLayout


def versioned(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a tensor and how often it was written to by now."""
    return tensor, tensor._version


@dataclass(frozen=True, eq=False, kw_only=True)
class SequenceInfo:
    """One sequence of a batch, and all of a batch that holds one. An encoder-decoder batch is its decoder's sequence, with an `encoder`.

    B rows, S tokens of each before padding, s = padded S / layout.size of them on this rank.

    Args:
        rows: B, samples in the batch.
        length: S, tokens of each sequence as given.
        padded_length: tokens after padding to what the degrees divide.
        boundaries: documents in global positions, with the padding as a document of its own; None for one document.
        position_ids: this rank's global positions, (B, s).
        positions_given: the batch's loader gave them.
        documents_declared: the user said that positions which restart begin documents.
        shift_labels: this rank's targets, (B, s), None where the batch has no labels.
        attention_mask: this rank's part of the batch's padding mask as its loader gave it, (B, s), bool; None where the batch has none. In
            memory of its own: a step may change the batch's in place.
        mask_in_batch: the batch's own entry of it, and its version when it was given, before the step.
        valid: the run of keys that the padding mask leaves visible in each row, (B, 2); None where it hides none, or leaves more than a run.
        visible_keys: the keys that it leaves visible, whole, (B, S), bool, where they are more than a run; else None.
        layout: which tokens each rank holds.
        balance: how that compares to zigzag; None for one document a row, or where nothing was compared.
        dropout: what attention dropout is drawn from; None in evaluation.
        other_inputs: names and shapes of what else the batch holds and attention may be made of (images, audio).
        uneven_entries: data-parallel groups hold other entries: images in some alone, say.
        is_whole: it holds no sequence: nothing is split, and every rank of a sequence runs all of its group's rows.
        seed: of the numbers that the ranks of a sequence draw alike: the same on them, another one in each data-parallel group, step and
            micro-batch. None where each draws its own.
        is_longer: some rank has more tokens than any had before.
        is_padded: the degrees do not divide the length of some rank's batch.
        is_changed: numbers by which the step may do other things have changed on some rank.
        is_filler: none of the rows counts: they only keep other ranks' collectives company.
        has_fillers: that is so on some rank.
        rows_of_groups: of each data-parallel group, the rows that count; below 0 where those of one of several loaders do not;
            empty where nothing was told of them, in a trial.
        encoder: the encoder's sequence; None where the batch holds one sequence.
        beside: other sequences, each with names and rows of its own: of a step that sees whole sequences alone.
        dims: of the batch's entries that carry this sequence, along which dim.
        names: of all of the batch's entries, in order.
        made_inputs: this rank's part of a decoder's inputs that its model would make of labels or ids by itself, by name: its loader gave none.
        encoder_is_whole: this is a decoder's sequence, and its encoder reads none of the batch: sounds or images, whole on every rank.
    """

    rows: int
    length: int
    padded_length: int
    boundaries: Tensor | None
    position_ids: Tensor | None
    shift_labels: Tensor | None
    positions_given: bool = False
    documents_declared: bool = False
    attention_mask: Tensor | None = None
    mask_in_batch: tuple[Tensor, int] | None = None
    valid: Tensor | None = None
    visible_keys: Tensor | None = None
    layout: SequenceLayout = field(default_factory=SequenceLayout)
    balance: Balance | None = None
    dropout: DropoutSource | None = None
    other_inputs: tuple[str, ...] = ()
    uneven_entries: bool = False
    is_whole: bool = False
    seed: int | None = None
    is_longer: bool = False
    is_padded: bool = False
    is_changed: bool = False
    is_filler: bool = False
    has_fillers: bool = False
    rows_of_groups: tuple[int, ...] = ()
    encoder: SequenceInfo | None = None
    beside: tuple[SequenceInfo, ...] = ()
    encoder_is_whole: bool = False
    dims: Mapping[str, int] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    made_inputs: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def sequences(self) -> tuple[SequenceInfo, ...]:
        """This sequence, and the encoder's if there is one."""
        return (self,) if self.encoder is None else (self, self.encoder)

    @property
    def all_sequences(self) -> tuple[SequenceInfo, ...]:
        """Those, and the ones that stand beside them."""
        return (*self.sequences, *self.beside)

    @property
    def part_and_whole(self) -> tuple[int, int]:
        """Tokens of this sequence on a rank, and of the whole."""
        return self.padded_length // self.layout.size, self.length

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of this batch."""
        return max(each.length for each in self.all_sequences)

    @property
    def cut(self) -> tuple[int, ...]:
        """Where the sequences are cut, as groups of 2, 3, 4, 5 and 16 neighbouring tokens see it: alike for alike numbers."""
        ends = (
            [end for own in each.layout.assignment for _, end in own] or [each.padded_length // each.layout.multiple]
            for each in self.all_sequences
        )
        return tuple(end % 240 for of_sequence in ends for end in of_sequence)

    @property
    def pads(self) -> bool:
        """Whether the degrees do not divide the length of a sequence of this batch."""
        return any(each.padded_length > each.length for each in self.all_sequences)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(rows, padded tokens, tokens) of the whole batch, those of all its sequences together for each row."""
        each = [(s.rows // self.rows * s.padded_length, s.rows // self.rows * s.length) for s in self.all_sequences]
        padded, tokens = (sum(counts) for counts in zip(*each, strict=True))
        return self.rows, padded, tokens

    @property
    def local_tokens(self) -> int:
        """Tokens of all rows on this rank, an encoder's and a decoder's together; of a batch without a sequence its rows."""
        return self.rows * max(1, self.shape[1] // (1 if self.is_whole else self.layout.size))

    @property
    def is_uneven(self) -> bool:
        """Whether other data-parallel groups have other numbers of rows that count."""
        return len(set(self.rows_of_groups)) > 1

    def counts_apart(self, *, trains: bool) -> bool:
        """Return whether a mean over groups is none of one device's: some have fillers, or, in training, unequally many rows of one batch."""
        return self.has_fillers or (trains and self.is_uneven)

    @property
    def has_attention_mask(self) -> bool:
        """Whether the batch has a padding mask, be it that it hides nothing."""
        return self.attention_mask is not None

    @property
    def hides_keys(self) -> bool:
        """Whether the padding mask hides a token."""
        return self.valid is not None or self.visible_keys is not None

    def to(self, device: torch.device) -> SequenceInfo:
        """Return the same with what the step reads on its device; boundaries stay on the host."""
        return self.with_tensors(lambda tensor: tensor.to(device))

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> SequenceInfo:
        """Return the same with what the step reads on its device changed, tensor by tensor."""

        def changed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return replace(
            self,
            position_ids=changed(self.position_ids),
            shift_labels=changed(self.shift_labels),
            attention_mask=changed(self.attention_mask),
            mask_in_batch=None if self.mask_in_batch is None else versioned(change(self.mask_in_batch[0])),
            visible_keys=changed(self.visible_keys),
            made_inputs={name: change(tensor) for name, tensor in self.made_inputs.items()},
            encoder=None if self.encoder is None else self.encoder.with_tensors(change),
            beside=tuple(each.with_tensors(change) for each in self.beside),
        )
