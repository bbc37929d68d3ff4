"""Masks drawn and named, for every test of attention: a mask as the test describes it, for a length that padding may extend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_sp.attention import AttentionMask, boundaries_from_lengths

# One of each, and what meets in models: Mistral, Gemma, Llama 4, PaliGemma, padded batches.
NAMED: dict[str, dict[str, Any]] = {
    "causal": dict(),
    "full": dict(causal=False),
    "packed": dict(lengths=[[5, 20, 7], [32]]),
    "window left": dict(window_size=(6, None)),
    "window right": dict(causal=False, window_size=(None, 5)),
    "window both": dict(causal=False, window_size=(3, 9)),
    "window of itself": dict(causal=False, window_size=(0, 0)),
    "window over packed": dict(window_size=(4, None), lengths=[[5, 20, 7], [32]]),
    "chunks": dict(chunk_size=12),
    "chunks both ways": dict(causal=False, chunk_size=7),
    "padding left": dict(valid=[[4, 32], [0, 32]]),
    "padding right": dict(causal=False, valid=[[0, 19], [0, 32]]),
    "a row of padding": dict(valid=[[0, 0], [3, 30]]),
    "prefix": dict(bidirectional=[[[0, 11]], [[0, 3]]]),
    "images in a window": dict(window_size=(5, None), bidirectional=[[[2, 9], [20, 27]], [[0, 0], [10, 30]]]),
    "all together": dict(
        window_size=(9, None), chunk_size=14, lengths=[[5, 20, 7], [32]], valid=[[1, 30], [0, 32]], bidirectional=[[[7, 12]]]
    ),
    "dense": dict(causal=False, dense=1),
    "dense over a window": dict(window_size=(11, None), dense=2),
    "dense in blocks": dict(causal=False, dense=102),
    "a function": dict(causal=False, mask_mod="heads apart"),
    "a function over packed": dict(lengths=[[5, 20, 7], [32]], mask_mod="every third"),
    "a function of documents": dict(causal=False, mask_mod="documents"),
    "blocks chosen by hand": dict(causal=False, mask_mod="chosen"),
}  # fmt: skip
# Cross attention, for 21 keys.
CROSS: dict[str, dict[str, Any]] = {
    "cross": dict(causal=False),
    "cross packed": dict(causal=False, lengths=[[5, 20, 7], [32, 0, 0]], key_lengths=[[6, 11, 4], [13, 8, 0]]),
    "cross dense": dict(causal=False, dense=3),
    "cross a function": dict(causal=False, valid=[[2, 21], [0, 0]], mask_mod="every third"),
}
MASK_MODS: dict[str, Any] = {
    "heads apart": lambda row, head, query, key: (query + head) % 3 != key % (2 + head),
    "every third": lambda row, head, query, key: ((query - key) % 3 == 0) & (query != 8 + row),
    "documents": lambda row, head, query, key: (query // (9 + row) == key // (9 + row)) & (query >= key),
    "chosen": None,  # a `BlockMask`, made for its length by `chosen_blocks`
}


def dense_of(seed: int, length: int, keys: int) -> Tensor:
    """Return a mask drawn at random, of two rows, with queries that see nothing."""
    seen = torch.rand(2, 1, length, keys, generator=torch.Generator().manual_seed(seed)) < 0.4
    seen[0, :, length // 3] = False
    seen[1, :, : length // 2] = False
    if seed > 100:  # with blocks of 7 that are hidden in all rows
        seen &= (torch.arange(length)[:, None] // 7 + torch.arange(keys) // 7) % 3 > 0
    return seen


def chosen_blocks(length: int, keys: int) -> BlockMask:
    """Return a mask whose blocks say something else than its function: most are hidden, some seen whole where the function says no."""
    size = max(5, length // 7)
    shape = (1, 1, -(-length // size), -(-keys // size))
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(7))
    drawn[:, :, 1:2] = 1.0  # queries that see nothing

    def listed(table: Tensor) -> tuple[Tensor, Tensor]:
        order = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return table.sum(-1).to(torch.int32), order.to(torch.int32)

    whole = listed(drawn < 0.15)
    asked = listed((drawn >= 0.15) & (drawn < 0.5))
    function = MASK_MODS["every third"]
    return BlockMask.from_kv_blocks(*asked, *whole, BLOCK_SIZE=size, mask_mod=function, seq_lengths=(length, keys))


def build(
    options: dict[str, Any], length: int, padded: int, keys: int | None = None, padded_keys: int | None = None
) -> AttentionMask:
    """Return the mask of a test's description; what pads the sequence is a document of its own, and hidden among other keys."""
    options = dict(options)
    if "dense" in options:
        options["dense"] = dense_of(options["dense"], length, length if keys is None else keys)
    if "mask_mod" in options:
        made = MASK_MODS[options["mask_mod"]]
        options["mask_mod"] = made or chosen_blocks(length, length if keys is None else keys)
    lengths, key_lengths = options.pop("lengths", None), options.pop("key_lengths", None)
    if keys is not None and padded_keys is not None:
        options.setdefault("valid", [[0, keys]])
        if key_lengths is not None:
            options["key_boundaries"] = boundaries_from_lengths([[*row, padded_keys - keys] for row in key_lengths])
            options["boundaries"] = boundaries_from_lengths([[*row, padded - length] for row in lengths])
        options["valid"] = torch.tensor(options["valid"], dtype=torch.int64)
        return AttentionMask(**options)
    if lengths is None and padded > length:
        lengths = [[length]]
    if lengths is not None:
        padding = [padded - length] if padded > length else []
        options["boundaries"] = boundaries_from_lengths([[*row, *padding] for row in lengths])
    for name in ("valid", "bidirectional"):
        if name in options:
            options[name] = torch.tensor(options[name], dtype=torch.int64)
    return AttentionMask(**options)


def of_one_row(mask: AttentionMask, row: int) -> AttentionMask:
    """Return the mask of one row of the batch."""
    tensors = {name: getattr(mask, name) for name in ("boundaries", "valid", "bidirectional", "key_boundaries")}
    tensors["dense"] = mask.dense
    return replace(mask, **{n: None if t is None else t[row if len(t) > 1 else 0][None] for n, t in tensors.items()})


@st.composite
def drawn(draw: st.DrawFn, length: int, rows: int = 2, matrices: bool = False) -> dict[str, Any]:
    """Draw a description: any options together, for `rows` rows of a length; `matrices`: dense ones and functions too."""
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    sizes = st.one_of(st.none(), st.integers(0, length))
    options["window_size"] = (draw(sizes), draw(sizes))
    options["chunk_size"] = draw(st.one_of(st.none(), st.integers(1, length)))
    if draw(st.booleans()):
        options["lengths"] = [_parts(draw(_edges(length, 6)), length) for _ in range(rows)]
    if draw(st.booleans()):
        options["valid"] = [sorted(draw(st.tuples(*[st.integers(0, length)] * 2))) for _ in range(rows)]
    if draw(st.booleans()):
        runs = draw(st.integers(1, 3))
        edges = st.lists(st.integers(0, length), min_size=2 * runs, max_size=2 * runs).map(sorted)
        options["bidirectional"] = [[[e[2 * i], e[2 * i + 1]] for i in range(runs)] for e in (draw(edges) for _ in range(rows))]  # fmt: skip
    # A matrix of one key is refused where the sequence is padded.
    if matrices and length > 1 and draw(st.booleans()):
        options["dense"] = draw(st.integers(0, 200))
    if matrices and draw(st.booleans()):
        options["mask_mod"] = draw(st.sampled_from(list(MASK_MODS)))
    return options


def _edges(length: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, length - 1), max_size=most, unique=True).map(sorted) if length > 1 else st.just([])


def _parts(edges: list[int], length: int) -> list[int]:
    return [b - a for a, b in zip([0, *edges], [*edges, length], strict=True)]
