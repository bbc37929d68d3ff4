"""The mask as a value: which keys a query may see, in global positions. No S x S tensor is made of it; one may be given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_sp.attention.spec.block_mask import BlockTable, is_whole
from lightning_sp.attention.spec.score_mod import MaskMod
from lightning_sp.errors import SequenceParallelError


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which keys a query sees: one run of neighbouring keys for each query, so that a mask is no matrix, unless one is given.

    What is given restricts together; `bidirectional` adds within its document, and `dense` and `mask_mod` restrict the whole again.

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
        key_boundaries: In cross attention the documents of the keys, as `boundaries` with as many documents: a query of the i-th sees the keys
            of the i-th. Only with causal=False, and neither window, chunks nor bidirectional runs, which compare positions of one sequence.
        dense: Any mask, whole on every rank: bool, True if visible, shape (rows or 1, heads or 1, S or 1, T), on the queries' device. Beyond
            its S and T there is padding: nothing is visible. The tiled kernel computes it. Blocks of keys that it hides do not travel: of 512
            tokens, of a 64th of a sequence of more than 32,768, of a 16th of one of less than 8,192.
        mask_mod: (row, head, query, key) -> bool, in FlexAttention's form, global positions: any mask without a matrix; else as `dense`. Or a
            `BlockMask` of the whole sequence: what its lists of blocks say holds, as in a compiled `flex_attention`.

    Raises:
        SequenceParallelError: tensors of another form, or numbers that contradict each other.
    """

    causal: bool = True
    boundaries: Tensor | None = None
    window_size: tuple[int | None, int | None] = (None, None)
    chunk_size: int | None = None
    valid: Tensor | None = None
    bidirectional: Tensor | None = None
    key_boundaries: Tensor | None = None
    dense: Tensor | None = None
    mask_mod: Callable[..., Tensor] | BlockMask | MaskMod | None = None
    # Read once: where torch.compile traces the attention, a number out of a tensor would break the graph.
    _length: int | None = field(init=False, default=None)
    _key_length: int | None = field(init=False, default=None)
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
            ("key_boundaries", self.key_boundaries, "(rows, documents + 1)"),
        ):
            if value is not None:
                self._check_form(name, value, dims)
        for name, known, b in (
            ("boundaries", "_length", self.boundaries),
            ("key_boundaries", "_key_length", self.key_boundaries),
        ):
            if b is None:
                continue
            if bool((b[:, 0] != 0).any()) or bool((b.diff(dim=1) < 0).any()) or bool((b[:, -1] != b[0, -1]).any()):
                raise SequenceParallelError(
                    f"{name} {b.tolist()}: each row must rise from 0 to the sequence length, the same in all rows"
                )
            object.__setattr__(self, known, int(b[0, -1]))
        self._check_cross()
        if self.dense is not None and (self.dense.dim() != 4 or self.dense.dtype != torch.bool):
            raise SequenceParallelError(
                f"dense of shape {tuple(self.dense.shape)}, {self.dense.dtype}: must be bool, (rows or 1, heads or 1, S or 1, T); scores that "
                "are added are a bias"
            )
        if isinstance(self.mask_mod, BlockMask):
            made = MaskMod(self.mask_mod.mask_mod, BlockTable.of(self.mask_mod))
            object.__setattr__(self, "mask_mod", made)
        elif self.mask_mod is not None and not isinstance(self.mask_mod, MaskMod):
            object.__setattr__(self, "mask_mod", MaskMod(self.mask_mod))
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
            "key_boundaries": len(shape) == 2 and shape[1] >= 2,
            "valid": len(shape) == 2 and shape[1] == 2,
            "bidirectional": len(shape) == 3 and shape[2] == 2,
        }[name]
        if not fits or value.dtype != torch.int64 or value.device.type != "cpu":
            raise SequenceParallelError(
                f"{name} of shape {shape}, {value.dtype} on {value.device}: must be int64 on the CPU, {dims}"
            )

    def _check_cross(self) -> None:
        """Refuse what compares positions of one sequence, where queries and keys are of two."""
        own, keys = self.boundaries, self.key_boundaries
        if keys is None:
            return
        if own is None or own.shape != keys.shape:
            raise SequenceParallelError(
                f"key_boundaries of shape {tuple(keys.shape)} with boundaries {'None' if own is None else f'of shape {tuple(own.shape)}'}: "
                "documents of queries and keys go in pairs, so both must have one shape"
            )
        self._refuse_order("key_boundaries")

    def _refuse_order(self, what: str) -> None:
        given = {
            "causal=True": self.causal,
            f"window_size={self.window_size}": self.window_size != (None, None),
            f"chunk_size={self.chunk_size}": self.chunk_size is not None,
            "bidirectional": self.bidirectional is not None,
        }
        if found := [name for name, there in given.items() if there]:
            raise SequenceParallelError(
                f"{what} with {', '.join(found)}: cross attention has no order between queries and keys; use "
                "AttentionMask(causal=False) with boundaries and key_boundaries, valid, dense or mask_mod"
            )

    def check(
        self, *, length: int, batch: int, key_length: int | None = None, heads: int | None = None, multiple: int | None = None
    ) -> None:  # fmt: skip
        """Refuse what does not fit the global length or the batch.

        Args:
            length: global queries, padding included.
            batch: rows.
            key_length: global keys, padding included; None for those of the queries.
            heads: query heads.
            multiple: of what padding extends a sequence to; None where any number of tokens may be padding.
        """
        keys = length if key_length is None else key_length
        if keys != length:
            self._refuse_order(f"{length} queries over {keys} keys")
            if self.boundaries is not None and self.key_boundaries is None:
                raise SequenceParallelError(
                    f"boundaries for {length} queries over {keys} keys: give key_boundaries, the documents of the keys, too"
                )
        if self.key_boundaries is not None and self._key_length != keys:
            raise SequenceParallelError(
                f"key_boundaries end at {self._key_length} tokens, the (padded) keys are {keys}: they must be equal"
            )
        if self.dense is not None:
            check_whole(
                "dense", self.dense, batch=batch, heads=heads, length=length, key_length=keys, multiple=multiple
            )
        if isinstance(self.mask_mod, MaskMod) and self.mask_mod.table is not None:
            table = self.mask_mod.table
            table.check(length=length, batch=batch, key_length=keys, heads=heads, multiple=multiple)
        if self.boundaries is not None and self._length != length:
            raise SequenceParallelError(
                f"the documents' boundaries end at {self._length} tokens, the (padded) sequence has {length}: they must be equal"
            )
        if self._longest > keys:
            raise SequenceParallelError(
                f"valid or bidirectional tokens end at {self._longest}, the (padded) sequence has {keys} tokens"
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

    @property
    def run_tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that say which runs of keys are visible."""
        return (self.boundaries, self.valid, self.bidirectional, self.key_boundaries)

    @property
    def contents(self) -> tuple[object, ...]:
        """What says which runs of keys are visible, to compare masks by: every field but a matrix and a function, whatever is added."""
        values = (getattr(self, f.name) for f in fields(self) if f.init and f.name not in ("dense", "mask_mod"))
        return tuple((v.shape, v.numpy().tobytes()) if isinstance(v, Tensor) else v for v in values)


def check_whole(
    name: str, value: Tensor, *, batch: int, heads: int | None, length: int, key_length: int, multiple: int | None
) -> None:
    """Refuse a whole bias or mask whose shape does not fit; shorter than the padded sequence is fine, what is beyond is padding."""
    rows, own_heads, queries, keys = value.shape
    if keys == 1 < key_length:
        # Torch's functions would spread the one key over all, and here all but the first would be padding.
        raise SequenceParallelError(
            f"{name} of shape {tuple(value.shape)}: one number for {key_length} keys (padding included); keys are not broadcast: "
            f"expand its last dim to the sequence's keys, {name}.expand(-1, -1, -1, keys)"
        )
    if not (
        rows in (1, batch)
        and (heads is None or own_heads in (1, heads))
        and (queries == 1 or is_whole(queries, length, multiple))
        and keys >= 1
        and is_whole(keys, key_length, multiple)
    ):
        raise SequenceParallelError(
            f"{name} of shape {tuple(value.shape)}: must be (1 or {batch} rows, 1 or {heads} heads, 1 or the queries, the keys), whole, of the "
            f"sequence's {length} queries and {key_length} keys (padding included)"
        )
