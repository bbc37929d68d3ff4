"""How to find and read the sequence in a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

from torch import Tensor

from lightning_sp.context.masks import AttentionPattern


@dataclass(frozen=True)
class ShardOptions:
    """How to find and read the sequence in a batch; see the options of the same names in `config`.

    `device` and `attention` are what documents are balanced for: the type of device, and the layers' masks, one causal one if empty.
    `none_declared` is whether the user says that no entry but those of known names is a sequence, by an empty `sequence_dims`; `unreachable`
    is why a model's attention cannot be reached, which then takes batches without a sequence alone; empty where it can.
    `infer_sequences` is whether entries of other names are taken for sequences by their shapes, to be tried by a preflight;
    `inferred_dims` are those that were, and `whole_entries` those that were of another length than the sequence: they are no part of one that
    is as long by chance.
    `decoder_inputs` makes a Hugging Face decoder's input, where the batch has none, of the entry `decoder_inputs_of`, whole;
    `decoder_hides` is the token that its padding mask then hides, None where it has no mask.
    `placeholders` are ids in whose place a model puts tokens of images, videos or sounds. `apart` is whether the sequences of an
    encoder-decoder batch are padded to different lengths where they must be told apart, as a step in progress does. `row_end` is a token
    that each row must have, for the model classifies rows by it. `virtual_tokens` are those that a model puts before its sequence.
    `global_view` is whether a step sees whole sequences: then a batch holds what its loader gave, and padding needs no value.
    `is_split` is whether ranks share a sequence: where none do, a batch passes as it is, and neither the shift of its labels nor other names
    need to be known.
    """

    sequence_dims: Mapping[str, int] = field(default_factory=dict)
    none_declared: bool = False
    unreachable: str = ""
    infer_sequences: bool = False
    inferred_dims: Mapping[str, int] = field(default_factory=dict)
    whole_entries: Set[str] = frozenset()
    labels_shifted: bool | None = None
    model_shifts_labels: bool = False
    packed_documents: bool | None = None
    balance: str = "zigzag"
    device: str = "cpu"
    attention: tuple[AttentionPattern, ...] = ()
    decoder_inputs: Callable[[Tensor], Tensor] | None = None
    decoder_inputs_of: str = "labels"
    decoder_hides: int | None = None
    placeholders: tuple[int, ...] = ()
    apart: bool = True
    row_end: int | None = None
    virtual_tokens: int = 0
    global_view: bool = False
    is_split: bool = True
