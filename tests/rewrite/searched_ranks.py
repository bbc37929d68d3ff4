"""What runs in the ranks: layers whose masks hide by a function or a matrix, shared, or another for each layer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.data import DataLoader

from lightning_sp.attention.plan import block_sparsity
from lightning_sp.errors import SequenceParallelError
from tests.rewrite import mask_models
from tests.rewrite.mask_models import DIM, HEADS
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, plain_trainer, quiet_trainer

LAYERS, LENGTH = 3, 32


class Layers(nn.Module):
    """Attentions in a row under one mask, or masks that differ in a way that a kind names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.window = kind, 0
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.qkv = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(LAYERS))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        places = torch.arange(LENGTH)
        reach, dense = torch.tensor([24]), places[:, None] - places < 24
        shared: Any = None

        def by_object(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q - k).abs() < self.window

        for number, layer in enumerate(self.qkv):
            q, k, v = layer(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            window = 24 - 8 * number
            self.window = window if self.kind == "changed" else 16
            if self.kind == "written":
                reach.fill_(window)
            if self.kind == "matrix of each layer":
                dense = dense & ((places[:, None] - places).abs() < window)
            if self.kind.startswith("matrix"):
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=dense)
            else:
                function = {
                    "shared": lambda b, h, q, k: (q - k).abs() < reach[0],
                    "of each layer": lambda b, h, q, k, window=window: (q - k).abs() < window,
                    "written": lambda b, h, q, k: (q - k).abs() < reach[0],
                    "by an object": by_object,
                    "changed": by_object,
                }[self.kind]
                made = create_block_mask(function, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=4)
                shared = shared or made
                block_mask = shared if self.kind in ("shared", "by an object") else made
                out = mask_models.flex_attention(q, k, v, block_mask=block_mask)
            x = x + out.transpose(1, 2).flatten(2)
        return self.head(x)


def fit(kind: str, strategy: dict[str, Any] | None) -> tuple[dict[str, Tensor], int]:
    """Return the gradients of the second of two steps, and how many masks were searched in both."""
    torch.manual_seed(0)
    module = Plain(lambda: Layers(kind))
    searched: list[int] = []
    own = block_sparsity._searched

    def counted(*args: Any) -> Tensor:
        searched.append(1)
        return own(*args)

    plain = strategy is None
    flex = mock.patch.object(mask_models, "flex_attention", mask_models.plain_flex) if plain else nullcontext()
    trainer = (
        plain_trainer(max_steps=2)
        if plain
        else quiet_trainer(2, strategy={**strategy, "preflight": False}, max_steps=2)
    )
    with flex, mock.patch.object(block_sparsity, "_searched", counted):
        trainer.fit(module, DataLoader(TokenDataset(4, LENGTH), batch_size=2))
    return module.raw_grads[-1], len(searched)


def refused(kind: str, strategy: dict[str, Any]) -> str:
    """Return what a fit is refused with."""
    try:
        fit(kind, strategy)
    except SequenceParallelError as error:
        return str(error)
    return "nothing"
