"""The mask as a value: which keys a query may see, in global positions. Never a dense S x S tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sp.errors import SequenceParallelError


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which keys a query sees: one run of neighbouring keys for each query, so that no mask is ever a matrix.

    What is given restricts together; `bidirectional` then adds.

    Args:
        causal: A query sees no key after its own position.
        boundaries: Packed documents per row, int64 on the CPU, shape (rows, documents + 1), rows = batch or 1 for all; each row rises
            from 0 to the global sequence length, and repeats that length where it has fewer documents. A query sees its own document. None:
            one document.
        window_size: How many tokens before and after its own position a query sees, None for all of them: flash-attn's convention; a
            Hugging Face `sliding_window` of W is (W - 1, None) with causal. Tokens of documents before do not count.
        chunk_size: A query sees its own chunk of so many tokens, counted from the row's start (Llama 4). None: no chunks.
        valid: The keys of each row that are no padding, [start, end), int64 on the CPU, shape (rows, 2): what a padding mask says. A query
            that sees no key gives zero and gets no gradient. None: all.
        bidirectional: Runs of tokens, [start, end), that see one another whatever causal, window and chunk say, within their document: the
            prefix of a prefix-LM, an image among text. int64 on the CPU, shape (rows, runs, 2), rising and apart; (n, n) for none.

    Raises:
        SequenceParallelError: tensors of another form, or numbers that contradict each other.
    """

    causal: bool = True
    boundaries: Tensor | None = None
    window_size: tuple[int | None, int | None] = (None, None)
    chunk_size: int | None = None
    valid: Tensor | None = None
    bidirectional: Tensor | None = None
    # Read once: where torch.compile traces the attention, a number out of a tensor would break the graph.
    _length: int | None = field(init=False, default=None)
    _longest: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if any(side is not None and side < 0 for side in self.window_size) or len(self.window_size) != 2:
            raise SequenceParallelError(
                f"window_size={self.window_size}: two numbers of tokens before and after a query, each 0 or more, or None for all"
            )
        if self.chunk_size is not None and self.chunk_size < 1:
            raise SequenceParallelError(f"chunk_size={self.chunk_size}: must be at least 1 token, or None")
        for name, value, dims in (
            ("boundaries", self.boundaries, "(rows, documents + 1)"),
            ("valid", self.valid, "(rows, 2)"),
            ("bidirectional", self.bidirectional, "(rows, runs, 2)"),
        ):
            if value is not None:
                self._check_form(name, value, dims)
        b = self.boundaries
        if b is not None:
            if bool((b[:, 0] != 0).any()) or bool((b.diff(dim=1) < 0).any()) or bool((b[:, -1] != b[0, -1]).any()):
                raise SequenceParallelError(
                    f"boundaries {b.tolist()}: each row must rise from 0 to the sequence length, the same in all rows"
                )
            object.__setattr__(self, "_length", int(b[0, -1]))
        for name, value in (("valid", self.valid), ("bidirectional", self.bidirectional)):
            if value is None or value.numel() == 0:
                continue
            if bool((value.flatten(1).diff(dim=1) < 0).any()) or int(value.min()) < 0:
                raise SequenceParallelError(f"{name} {value.tolist()}: runs [start, end) must rise from 0 within a row")
            object.__setattr__(self, "_longest", max(self._longest, int(value.max())))

    @staticmethod
    def _check_form(name: str, value: Tensor, dims: str) -> None:
        shape = tuple(value.shape)
        fits = {
            "boundaries": len(shape) == 2 and shape[1] >= 2,
            "valid": len(shape) == 2 and shape[1] == 2,
            "bidirectional": len(shape) == 3 and shape[2] == 2,
        }[name]
        if not fits or value.dtype != torch.int64 or value.device.type != "cpu":
            raise SequenceParallelError(
                f"{name} of shape {shape}, {value.dtype} on {value.device}: must be int64 on the CPU, {dims}"
            )

    def check(self, *, length: int, batch: int) -> None:
        """Refuse what does not fit the global length or the batch."""
        if self.boundaries is not None and self._length != length:
            raise SequenceParallelError(
                f"the documents' boundaries end at {self._length} tokens, the (padded) sequence has {length}: they must be equal"
            )
        if self._longest > length:
            raise SequenceParallelError(
                f"valid or bidirectional tokens end at {self._longest}, the (padded) sequence has {length} tokens"
            )
        for name, value in (
            ("boundaries", self.boundaries),
            ("valid", self.valid),
            ("bidirectional", self.bidirectional),
        ):
            if value is not None and value.shape[0] not in (1, batch):
                raise SequenceParallelError(
                    f"{name} for {value.shape[0]} rows, but the batch has {batch}: must be 1 or {batch}"
                )

    def arguments(self) -> tuple[list[int], list[Tensor]]:
        """Return the mask as an operator takes it; `from_arguments` is the inverse."""
        left, right = self.window_size
        tensors = (self.boundaries, self.valid, self.bidirectional)
        numbers = [int(self.causal), -1 if left is None else left, -1 if right is None else right, self.chunk_size or 0]
        return [*numbers, *[int(t is not None) for t in tensors]], [t for t in tensors if t is not None]

    @classmethod
    def from_arguments(cls, numbers: Sequence[int], tensors: Sequence[Tensor]) -> AttentionMask:
        """Return the mask that `arguments` described."""
        causal, left, right, chunk, *given = (int(n) for n in numbers)
        window = (None if left < 0 else left, None if right < 0 else right)
        present = iter(tensors)
        boundaries, valid, bidirectional = (next(present) if there else None for there in given)
        return cls(bool(causal), boundaries, window, chunk or None, valid, bidirectional)


def boundaries_from_lengths(lengths: list[list[int]]) -> Tensor:
    """Return boundaries from the document lengths of each row.

    Shapes: rows x documents -> (rows, most documents + 1), int64.
    """
    total = sum(lengths[0])
    width = max(len(row) for row in lengths) + 1
    rows = []
    for row in lengths:
        edges = [0]
        for length in row:
            edges.append(edges[-1] + length)
        rows.append(edges + [total] * (width - len(edges)))
    return torch.tensor(rows, dtype=torch.int64)


def boundaries_from_positions(position_ids: Tensor) -> Tensor | None:
    """Return the documents of packed rows: one begins wherever the position does not rise by one. None when no row has two.

    Shapes: (B, S) -> (B, documents + 1), int64 on the CPU. Source: Hugging Face's convention for packed rows.
    """
    position_ids = position_ids.cpu()
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=1) != 1
    counts = starts.sum(1)
    if int(counts.max()) <= 1:
        return None
    length = position_ids.shape[1]
    rows = torch.full((position_ids.shape[0], int(counts.max()) + 1), length, dtype=torch.int64)
    for row, begin in enumerate(starts):
        edges = begin.nonzero().flatten()
        rows[row, : len(edges)] = edges
    return rows


def document_ids(boundaries: Tensor, length: int) -> Tensor:
    """Return for each token the number of its document.

    Shapes: (rows, documents + 1) -> (rows, S), int64.
    """
    tokens = torch.arange(length).expand(boundaries.shape[0], length).contiguous()
    return torch.searchsorted(boundaries[:, 1:].contiguous(), tokens, right=True)
