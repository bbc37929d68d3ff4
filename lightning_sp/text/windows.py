"""Documents -> windows of S inputs and their S targets, addressable by index; labels are shifted here, before sharding.

    document   |aaaaaaaaaaa|  S = 4   windows aaaa(a) aaaa(a) aa(a)..      the last one: dropped or padded, and counted
    packed     |aaaaaa|bbb|cccccc|    windows aaaa(a) aabb(b) b.cc ...     `.`: a document's last token has no target

Owns where windows lie and the four tensors of a sample. Not here: the order of windows, their batching, their shards.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_sp.errors import SequenceParallelError, check_whole_numbers, closest
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.text.corpus import Corpus

Packing = Literal["document", "packed"]
Remainder = Literal["drop", "pad"]
Sample = dict[str, Tensor]


class Windows(Dataset[Sample]):
    """Fixed-size windows over a corpus: pure, map style, O(log documents) to find one, nothing copied before.

    A sample holds `input_ids`, `shift_labels` (the target of each position, -100 where none), `labels` (Hugging Face's
    unshifted convention: labels[t + 1] == shift_labels[t], labels[0] == -100) and `position_ids` (from 0 at the
    window's start and at each document's start). A padded tail has no targets and is a document of its own.

    Args:
        corpus: The documents.
        sequence_length: S, the inputs of a window.
        packing: "document": a window lies in one document. "packed": documents are concatenated and cut.
        remainder: What is left shorter than a window (at the end of each document, or of all when packed): dropped
            or padded. `num_dropped_targets` and `num_padded_positions` count it.
        vocab_size: Ids outside [0, vocab_size) are refused when read; None skips the check.
        pad_id: Input id of padded positions.

    Shapes:
        Every tensor of a sample is (S,), int64.
    """

    def __init__(
        self,
        corpus: Corpus,
        sequence_length: int,
        *,
        packing: Packing = "document",
        remainder: Remainder = "drop",
        vocab_size: int | None = None,
        pad_id: int = 0,
    ) -> None:
        for name, value, known in (
            ("packing", packing, ("document", "packed")),
            ("remainder", remainder, ("drop", "pad")),
        ):
            if value not in known:
                raise SequenceParallelError(f"{name} must be one of {known}, got {value!r}{closest(str(value), known)}")
        check_whole_numbers({"sequence_length": sequence_length})
        self.corpus, self.sequence_length = corpus, sequence_length
        self.packing, self.remainder = packing, remainder
        self.vocab_size, self.pad_id = vocab_size, pad_id
        sizes = corpus.sizes
        # Positions that may be inputs: all but a document's last token, or every token of the stream when packed.
        lengths = np.maximum(sizes - 1, 0) if packing == "document" else np.array([int(sizes.sum())], dtype=np.int64)
        full, rest = np.divmod(lengths, sequence_length)
        windows = full + (rest > 0) if remainder == "pad" else full
        self.num_padded_positions = int((sequence_length - rest)[rest > 0].sum()) if remainder == "pad" else 0
        self._window_ends: NDArray[np.int64] = np.cumsum(windows)
        self._token_ends: NDArray[np.int64] = np.cumsum(sizes)
        self.num_targets = int(np.maximum(sizes - 1, 0).sum())
        self.num_dropped_targets = 0
        if remainder == "drop":
            used = int(full.sum()) * sequence_length
            # When packed, a document's last token is an input without a target.
            lost = int(np.searchsorted(self._last_positions(), used)) if packing == "packed" else 0
            self.num_dropped_targets = self.num_targets - (used - lost)

    def _last_positions(self) -> NDArray[np.int64]:
        return self._token_ends[self.corpus.sizes > 0] - 1

    def __len__(self) -> int:
        """Return the number of windows."""
        return int(self._window_ends[-1]) if len(self._window_ends) else 0

    def describe(self) -> str:
        """Return one line: how many windows, and what was dropped or padded."""
        left = (
            f"{self.num_dropped_targets:,} of {self.num_targets:,} targets dropped"
            if self.remainder == "drop"
            else f"{self.num_padded_positions:,} positions padded for {self.num_targets:,} targets"
        )
        return (
            f"{len(self):,} windows of {self.sequence_length:,} tokens from {len(self.corpus.sizes):,} documents "
            f"(packing={self.packing!r}), {left} (remainder={self.remainder!r})"
        )

    def __getitem__(self, index: int) -> Sample:
        """Return one window.

        Raises:
            SequenceParallelError: When a token id is outside the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        inputs = np.full(self.sequence_length, self.pad_id, dtype=np.int64)
        targets = np.full(self.sequence_length, IGNORE_INDEX, dtype=np.int64)
        positions = np.empty(self.sequence_length, dtype=np.int64)
        offset = 0
        for document, start, stop in self._pieces(index):
            length = stop - start
            tokens = self.corpus.read(document, start, min(stop + 1, int(self.corpus.sizes[document])))
            self._check_ids(tokens, document)
            inputs[offset : offset + length] = tokens[:length]
            targets[offset : offset + len(tokens) - 1] = tokens[1 : length + 1]
            positions[offset : offset + length] = np.arange(length)
            offset += length
        positions[offset:] = np.arange(self.sequence_length - offset)
        labels = np.concatenate([[IGNORE_INDEX], targets[:-1]])
        arrays = {"input_ids": inputs, "shift_labels": targets, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _pieces(self, index: int) -> list[tuple[int, int, int]]:
        """Return the (document, start, stop) of a window's inputs, in order."""
        length = self.sequence_length
        if self.packing == "document":
            document = int(np.searchsorted(self._window_ends, index, side="right"))
            first_window = int(self._window_ends[document - 1]) if document else 0
            start = (index - first_window) * length
            return [(document, start, min(start + length, int(self.corpus.sizes[document]) - 1))]
        offset, end = index * length, min((index + 1) * length, int(self._token_ends[-1]))
        pieces = []
        document = int(np.searchsorted(self._token_ends, offset, side="right"))
        while offset < end:
            first_token = int(self._token_ends[document] - self.corpus.sizes[document])
            stop = min(end, int(self._token_ends[document]))
            if stop > offset:
                pieces.append((document, offset - first_token, stop - first_token))
            offset, document = stop, document + 1
        return pieces

    def _check_ids(self, tokens: NDArray[np.integer], document: int) -> None:
        if self.vocab_size is None or not len(tokens):
            return
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise SequenceParallelError(
                f"document {self.corpus.names[document]!r} holds token id {low if low < 0 else high}, outside the "
                f"vocabulary [0, {self.vocab_size}): the tokens were made by another tokenizer than the one given"
            )
