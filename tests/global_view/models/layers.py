"""Layers as users write them: attention of many kinds, positions of many kinds, convolutions, experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, E, H = 23, 16, 4
D = E // H


class Attention(nn.Module):
    """Written out, with what a subclass does to the scores."""

    kv_heads = H

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(E, E), nn.Linear(E, E)
        self.k, self.v = nn.Linear(E, self.kv_heads * D), nn.Linear(E, self.kv_heads * D)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, H, D).permute(0, 2, 1, 3)
        k, v = (f(x).view(b, t, self.kv_heads, D).permute(0, 2, 1, 3) for f in (self.k, self.v))
        if self.kv_heads < H:
            k, v = (
                y[:, :, None].expand(b, self.kv_heads, H // self.kv_heads, t, D).reshape(b, H, t, D) for y in (k, v)
            )
        weights = F.softmax(self.scores(q, k), dim=-1, dtype=torch.float64).type_as(q)
        return self.o((weights @ v).transpose(1, 2).reshape(b, t, E))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        t = q.shape[2]
        hidden = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
        return (torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(D)).masked_fill(hidden, -torch.inf)


class Grouped(Attention):
    kv_heads = 2


class OfOneKey(Attention):
    kv_heads = 1


class Alibi(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        t = torch.arange(q.shape[2])
        slopes = 2.0 ** -torch.arange(1, H + 1, dtype=q.dtype)
        return super().scores(q, k) - slopes.view(H, 1, 1) * (t[:, None] - t[None]).abs()


class Buckets(Attention):
    """As T5's, bidirectional."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, H)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        t = torch.arange(q.shape[2])
        distance = (t[None] - t[:, None]).clamp(-4, 3) + 4
        return q @ k.transpose(3, 2) + self.table(distance).permute(2, 0, 1).unsqueeze(0)


class Window(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        t = torch.arange(q.shape[2])
        near = (t[:, None] >= t[None]) & (t[:, None] - t[None] < 5)
        return torch.where(near, q @ k.mT * D**-0.5, torch.finfo(q.dtype).min)


class Capped(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        capped = 2.0 * torch.tanh(q @ k.mT / (math.sqrt(D) * 2.0))
        return capped + torch.full((q.shape[2], q.shape[2]), -1e30, dtype=q.dtype).triu(1)


class Cosine(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(F.normalize(q, dim=-1) * 3, F.normalize(k, dim=-1) * 3)


class Torchs(nn.Module):
    """`nn.MultiheadAttention`, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        out: Tensor = self.inner(x, x, x, attn_mask=hidden, need_weights=False)[0]
        return out


class TokenShift(nn.Module):
    """As RWKV's."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.mix, self.key = nn.ZeroPad2d((0, 0, 1, -1)), nn.Parameter(torch.rand(E)), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        before = self.shift(x)
        return torch.relu(self.key(x * self.mix + before * (1 - self.mix))).square()


class CausalConv(nn.Module):
    """As Mamba's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv1d(E, E, 4, groups=E, padding=3), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return F.silu(self.conv(x.transpose(1, 2))[..., :length]).transpose(1, 2) * torch.sigmoid(self.gate(x))


class Experts(nn.Module):
    """All experts, weighed by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(E, 3), nn.ModuleList([nn.Linear(E, E) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return torch.stack([f(x) for f in self.experts], dim=-1).mul(weights.unsqueeze(-2)).sum(-1)


class Squeeze(nn.Module):
    """A gate for each feature from the mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(E, 4), nn.Linear(4, E)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean(dim=1, keepdim=True)))))


class Summary(nn.Module):
    """What the first token becomes, for all of them: a unit of FSDP that gives a token, as one that pools by it does."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(E, 4), nn.Linear(4, E)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.gelu(self.down(x)))[:, 0].unsqueeze(1)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each
    for each in (
        Attention, Grouped, OfOneKey, Alibi, Buckets, Window, Capped, Cosine, Torchs, TokenShift, CausalConv, Experts, Squeeze, Summary,
    )
}  # fmt: skip


class Layered(nn.Module):
    """Two layers of a kind between embeddings with sinusoidal positions and a class token, and a head."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, E), nn.Linear(E, V)
        self.token = nn.Parameter(torch.randn(1, 1, E))
        self.h = nn.ModuleList([LAYERS[layer](), LAYERS[layer]()])
        self.norms = nn.ModuleList([nn.LayerNorm(E), nn.LayerNorm(E)])

    def forward(self, ids: Tensor) -> Tensor:
        t = ids.shape[1]
        angles = torch.arange(t)[:, None] / 100 ** (torch.arange(0, E, 2) / E)
        positions = torch.stack([angles.sin(), angles.cos()], -1).flatten(1).to(self.token.dtype)
        x = torch.cat([self.token.expand(ids.shape[0], -1, -1), self.embed(ids) + positions], dim=1)
        for norm, layer in zip(self.norms, self.h, strict=True):
            x = x + layer(norm(x))
        return self.head(x[:, :-1])


def smoothed(logits: Tensor, batch: Any) -> Tensor:
    """Each place predicts the token behind it, with label smoothing."""
    return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten(), label_smoothing=0.1)
