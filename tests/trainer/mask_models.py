"""Models that hand their attention an explicit mask, dropout or a function, as users write them; plain torch on one process runs them too."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
