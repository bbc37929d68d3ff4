"""Models that hand their attention an explicit mask, dropout or a function, as users write them; plain torch on one process runs them too."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from tests.trainer.tiny import VOCAB

HEADS, DIM = 4, 32


class Attending(nn.Module):
    """An embedding, projections, an attention of a subclass' choice, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.positions, self.qkv = nn.Embedding(128, DIM), nn.Linear(DIM, 3 * DIM)

    def forward(self, input_ids: Tensor, position_ids: Tensor, **given: Any) -> Tensor:
        x = self.embedding(input_ids) + self.positions(position_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.head(self.attention(q, k, v, **given).transpose(1, 2).flatten(2))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        raise NotImplementedError


class Explicit(Attending):
    """F.scaled_dot_product_attention with a mask of a form of choice, of the whole sequence's length or of this rank's tokens."""

    def __init__(self, form: str, length: int = 32) -> None:
        super().__init__()
        self.form, self.length = form, length
        places = torch.arange(length)
        self.register_buffer("causal", places[:, None] >= places, persistent=False)
        distance = (places - places[:, None]).clamp(max=0).double()
        self.register_buffer("alibi", (0.5 ** torch.arange(1.0, HEADS + 1).double())[:, None, None] * distance)
        self.table = nn.Parameter(torch.randn(1, HEADS, length, length)) if form.startswith("learned") else None
        self.of_keys = nn.Parameter(torch.randn(HEADS, 1, length)) if form == "learned of keys" else None

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        tokens = q.shape[2]
        padding = given.get("attention_mask")
        hidden = None if padding is None else padding == 0
        causal: Tensor = self.causal  # type: ignore[assignment]
        forms: dict[str, Any] = {
            "whole": lambda: causal,
            "whole documents": lambda: causal & _documents(self.length),
            "whole inverted": lambda: torch.zeros_like(causal, dtype=q.dtype).masked_fill(~causal, -torch.inf),
            "alibi": lambda: self.alibi.to(q.dtype).masked_fill(~causal, -torch.inf),
            "learned": lambda: self.table.masked_fill(~causal, -torch.inf),
            "learned full": lambda: self.table,
            "learned of keys": lambda: self.table + self.of_keys,
            "keys": lambda: (torch.arange(self.length) % 5 != 1)[None],
            "batch": lambda: given["pairs"],
            "shard": lambda: torch.ones(tokens, tokens, dtype=torch.bool).tril(),
            "own queries": lambda: causal[:tokens],
            "other": lambda: torch.ones(tokens, tokens + 3, dtype=torch.bool),
            "integers": lambda: torch.ones(tokens, tokens, dtype=torch.int64),
            "padding": lambda: padding[:, None, None].bool(),
            "expanded padding": lambda: padding[:, None, None].bool().expand(-1, 1, tokens, -1),
            "lowest": lambda: (1.0 - padding[:, None, None].to(q.dtype)) * torch.finfo(q.dtype).min,
            "heads": lambda: torch.zeros(len(q), HEADS, tokens, tokens, dtype=q.dtype).masked_fill(
                hidden[:, None, None], -torch.inf
            ),
            "by position": lambda: torch.arange(tokens)[None, None, None] < padding.sum(1)[:, None, None, None],
            "causal padding": lambda: (
                torch.ones(tokens, tokens, dtype=torch.bool).tril() & padding[:, None, None].bool()
            ),
        }
        return F.scaled_dot_product_attention(q, k, v, forms[self.form](), is_causal=given.get("both", False))


def _documents(length: int) -> Tensor:
    """Of the tests' two packed rows, whose second documents begin at tokens 5 and 6. Shapes: (2, 1, S, S)."""
    later = torch.arange(length) >= torch.tensor([5, 6])[:, None]
    return (later[:, :, None] == later[:, None])[:, None]


class PaddedEncoder(nn.Module):
    """torch's own encoder and its padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(128, DIM)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.positions(position_ids)
        return self.head(self.encoder(x, src_key_padding_mask=attention_mask == 0))


with warnings.catch_warnings():
    # torch's own, when its compiler is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    compiled_flex = torch.compile(flex_attention)


def plain_flex(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any = None, block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:  # fmt: skip
    """FlexAttention by its definition, of the blocks that a mask lists: torch's own has no backward on the CPU."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    row, head, query, key = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, row, head, query, key)
    if block_mask is not None:
        seen = _listed(block_mask, block_mask.mask_mod(row, head, query, key).expand_as(scores))
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def _listed(block_mask: BlockMask, function: Tensor) -> Tensor:
    """Return what a block mask's lists and its function let be seen. Shapes: (B, H, S, T) -> the same."""
    seen = torch.zeros_like(function)
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices, function)]
    if block_mask.full_kv_num_blocks is not None:
        lists.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, torch.ones_like(function)))
    rows, columns = block_mask.BLOCK_SIZE
    for counts, blocks, part in lists:
        assert counts.shape[:2] == (1, 1)
        for i, count in enumerate(counts[0, 0].tolist()):
            for j in blocks[0, 0, i, :count].tolist():
                place = (..., slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                seen[place] |= part[place]
    return seen


def _chosen(length: int, function: Any, size: int = 4) -> BlockMask:
    """Return a mask of whose earlier blocks the first alone is seen, as a model makes one that chooses: its function does not say so."""
    count = -(-length // size)
    places = torch.arange(count)
    own = places[None, None, :, None].repeat(1, 1, 1, count).int()
    first = torch.zeros_like(own)
    return BlockMask.from_kv_blocks(
        torch.ones(1, 1, count).int(), own, (places > 0).int()[None, None], first, BLOCK_SIZE=size, mask_mod=function,
        seq_lengths=(length, length),
    )  # fmt: skip


class Flex(Attending):
    """FlexAttention with functions of a form of choice."""

    def __init__(self, form: str, length: int = 32) -> None:
        super().__init__()
        self.form, self.length = form, length
        self.register_buffer("slopes", 0.5 ** torch.arange(1.0, HEADS + 1))
        self.register_buffer("documents", torch.arange(length) * 3 // length, persistent=False)
        # One number for each position, and not one more.
        self.places = nn.Parameter(torch.randn(2, length)) if form == "positions" else None
        self.table = nn.Parameter(torch.randn(HEADS, 2 * length)) if "learned" in form else None
        self.gate = nn.Linear(1, 1) if "called" in form else None

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        options: dict[str, Any] = {}
        call = compiled_flex if self.form == "compiled" else flex_attention
        options["block_mask"] = self._block_mask(q)
        options["score_mod"] = self._score_mod()
        if self.form == "gqa":
            k, v, options["enable_gqa"], options["scale"] = k[:, ::2], v[:, ::2], True, 0.7
        if self.form == "gqa unsaid":
            k, v = k[:, ::2], v[:, ::2]
        if self.form == "lse":
            options["return_lse"] = True
        if self.form == "kernel options":
            options["kernel_options"] = {"BLOCK_M": 32}
        return call(q, k, v, **options)

    def _block_mask(self, q: Tensor) -> Any:
        documents, shard = self.documents, torch.arange(q.shape[2]) // 4
        functions: dict[str, Any] = {
            "documents": lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j),
            "shard's documents": lambda b, h, i, j: (shard[i] == shard[j]) & (i >= j),
            "by row and head": lambda b, h, i, j: (i - j) % (2 + b + h) == 0,
        }
        if self.form in ("full", "learned full"):
            return None
        if self.form == "by head of a shard":
            # The lists are head 0's, as of all create_block_mask makes without heads.
            near = lambda b, h, i, j: (i - j).abs() < 3 * (h + 1)  # noqa: E731
            return create_block_mask(near, None, None, q.shape[2], q.shape[2], device="cpu", BLOCK_SIZE=4)
        if self.form == "chosen by one shard" and dist.get_rank() == 0:
            return create_block_mask(_causal, None, None, q.shape[2], q.shape[2], device="cpu", BLOCK_SIZE=4)
        if self.form.startswith("chosen"):
            return _chosen(q.shape[2] if "shard" in self.form else self.length, _causal)
        if self.form.startswith("blocks"):
            length = q.shape[2] if self.form == "blocks of a shard" else self.length
            made = create_block_mask(_causal, None, None, length, length, device="cpu", BLOCK_SIZE=8)
            return BlockMask.from_kv_blocks(
                made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices, BLOCK_SIZE=8, seq_lengths=made.seq_lengths
            )  # fmt: skip
        length = {"whole": self.length, "documents": self.length, "other length": 48}.get(self.form, q.shape[2])
        return create_block_mask(functions.get(self.form, _causal), None, None, length, length, device="cpu")

    def _score_mod(self) -> Any:
        slopes, table, length, gate, places = self.slopes, self.table, self.length, self.gate, self.places

        def scaled(index: Tensor) -> Tensor:
            return table[index[0], index[1]] if isinstance(index, tuple) else index

        functions: dict[str, Any] = {
            "alibi": lambda s, b, h, i, j: s + slopes[h] * (j - i),
            "positions": lambda s, b, h, i, j: s * places[h % 2, i] + places[h % 2, j],
            "learned": lambda s, b, h, i, j: s + table[h, i - j + length],
            "learned full": lambda s, b, h, i, j: s * (1 + 0.1 * table[h, i]) + table[h, j],
            "learned attribute": self._by_attribute,
            "learned partial": partial(_by_table, table, length),
            "learned helper": lambda s, b, h, i, j: s + scaled((h, i - j + length)),
            "called": lambda s, b, h, i, j: s * gate.weight[0, 0] + gate(s.reshape(1)).sum(),
        }
        return functions.get(self.form)

    def _by_attribute(self, score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + self.table[head, query - key + self.length]


def _by_table(
    table: Tensor, length: int, score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    return score + table[head, query - key + length]


def _causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


class Imported(Attending):
    """A function that the file imported by its name, or that the module holds."""

    def __init__(self, held: bool = False) -> None:
        super().__init__()
        self.held = scaled_dot_product_attention if held else None

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return (self.held or scaled_dot_product_attention)(q, k, v, is_causal=True)


ATTENTIONS = {"sdpa": scaled_dot_product_attention}


class Handed(Attending):
    """The function in a table, in a partial, or as a default argument, by place or by name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.causal = partial(scaled_dot_product_attention, is_causal=True)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        if self.how == "table":
            return ATTENTIONS["sdpa"](q, k, v, is_causal=True)
        if self.how == "partial":
            return self.causal(q, k, v)
        return self.by_default(q, k, v) if self.how == "default" else by_name(q, k, v)

    def by_default(self, q: Tensor, k: Tensor, v: Tensor, attend: Any = scaled_dot_product_attention) -> Tensor:
        return attend(q, k, v, is_causal=True)


def by_name(q: Tensor, k: Tensor, v: Tensor, *, attend: Any = scaled_dot_product_attention) -> Tensor:
    """Attend by a keyword's default."""
    return attend(q, k, v, is_causal=True)


class CustomMask(nn.Module):
    """Hugging Face's Llama or Mistral whose own file would ask for a mask with a function more."""

    def __init__(self, model: nn.Module, form: str, length: int = 32) -> None:
        super().__init__()
        self.inner, self.form, self.config = model, form, model.config
        self.register_buffer("kinds", torch.arange(length) % 3, persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **given: Any) -> Any:
        from transformers.masking_utils import sliding_window_overlay

        kinds, shard = self.kinds, torch.arange(input_ids.shape[1]) % 3
        options: dict[str, Any] = {
            "and": dict(and_mask_function=lambda b, h, i, j: (i - j) % 3 != 1),
            "or": dict(or_mask_function=lambda b, h, i, j: (i - j).abs() < 4),
            "whole tensor": dict(and_mask_function=lambda b, h, i, j: (kinds[i] != kinds[j]) | (i == j)),
            "shard's tensor": dict(and_mask_function=lambda b, h, i, j: (shard[i] != shard[j]) | (i == j)),
            "second window": dict(and_mask_function=sliding_window_overlay(5)),
        }[self.form]
        file = sys.modules[type(self.inner).__mro__[_own(self.inner)].__module__]
        original = file.create_causal_mask
        file.create_causal_mask = partial(original, **options)
        try:
            return self.inner(input_ids, position_ids=position_ids, **given)
        finally:
            file.create_causal_mask = original


def _own(model: nn.Module) -> int:
    """FSDP2 puts a class of its own in front."""
    return next(i for i, each in enumerate(type(model).__mro__) if each.__module__.startswith("transformers.models"))


class T5Encoder(nn.Module):
    """Hugging Face's T5 encoder, whose attention adds a learned bias of distances."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5EncoderModel

        config = T5Config(
            vocab_size=VOCAB, d_model=DIM, d_kv=8, d_ff=48, num_layers=2, num_heads=HEADS, dropout_rate=0.0
        )
        self.inner, self.head, self.config = T5EncoderModel(config), nn.Linear(DIM, VOCAB), config

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        return self.head(self.inner(input_ids, attention_mask=attention_mask).last_hidden_state)


def built_by(build: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Build the masks of all attention calls by another function than `build_mask`, until it exits."""
    stack = ExitStack()
    for user in ("context.step", "rewrite.explicit_mask", "rewrite.hugging_face.masks"):
        stack.enter_context(patch(f"lightning_sp.{user}.build_mask", build))
    return stack
