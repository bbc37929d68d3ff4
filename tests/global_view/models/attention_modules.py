"""Attention and mixing of tokens as users write them: chunks, blocks, landmarks, linear, relative, of torch's own layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.global_view.whole import E

MODULES: dict[str, type[nn.Module]] = {}


def module(cls: type[nn.Module]) -> type[nn.Module]:
    MODULES[cls.__name__] = cls
    return cls


@module
class MultiQueryChunked(nn.Module):
    "attention chunked over queries by a python loop over x.split"

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(E, E)
        self.kv = nn.Linear(E, 4)

    def forward(self, x, ids, mask):
        B, S, _ = x.shape
        q = self.q(x).view(B, S, 4, 2).transpose(1, 2)
        k, v = self.kv(x).chunk(2, -1)
        outs = []
        for qc in q.split(4, dim=2):
            a = (qc @ k[:, None].transpose(-1, -2)) / math.sqrt(2)
            outs.append(a.softmax(-1) @ v[:, None])
        return torch.cat(outs, dim=2).transpose(1, 2).reshape(B, S, E)


@module
class BlockLocal(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x, ids, mask):
        B, S, _ = x.shape
        w = 4
        p = (-S) % w
        x = F.pad(x, (0, 0, 0, p))
        m = F.pad(mask, (0, p))
        q, k, v = self.qkv(x).view(B, -1, w, 3, E).unbind(3)
        sc = torch.einsum("bnqe,bnke->bnqk", q, k) * E**-0.5
        sc = sc.masked_fill(m.view(B, -1, 1, w) == 0, -1e9)
        return (sc.softmax(-1) @ v).reshape(B, -1, E)[:, :S]


@module
class TensorUnfoldWindows(nn.Module):
    def forward(self, x, ids, mask):
        w = F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1)  # B,S,E,3
        a = (w * x[..., None]).sum(2, keepdim=True).softmax(-1)
        return (w * a).sum(-1)


@module
class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x, ids, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q.softmax(-1)
        k = k.masked_fill(mask[..., None] == 0, -torch.inf).softmax(1)
        ctx = torch.einsum("bse,bsf->bef", k, v)
        return torch.einsum("bse,bef->bsf", q, ctx)


@module
class CausalLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x, ids, mask):
        q, k, v = (F.elu(t) + 1 for t in self.qkv(x).chunk(3, -1))
        kv = torch.einsum("bse,bsf->bsef", k, v).cumsum(1)
        z = k.cumsum(1)
        return torch.einsum("bse,bsef->bsf", q, kv) / torch.einsum("bse,bse->bs", q, z)[..., None]


@module
class RetentionParallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x, ids, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        n = torch.arange(x.shape[1])
        d = n[:, None] - n
        D = torch.where(d >= 0, 0.9 ** d.clamp(min=0).to(x.dtype), torch.zeros((), dtype=x.dtype))
        r = (q @ k.mT) * D
        r = r / r.detach().abs().sum(-1, keepdim=True).clamp(min=1)
        return r @ v


@module
class AFT(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.w = nn.Parameter(torch.randn(20, 20, dtype=torch.float64))

    def forward(self, x, ids, mask):
        S = x.shape[1]
        q, k, v = self.qkv(x).chunk(3, -1)
        w = self.w[:S, :S]
        ew = w.exp()
        ek = k.exp()
        return q.sigmoid() * (ew @ (ek * v)) / (ew @ ek)


@module
class RelPosShift(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(E, E)
        self.r = nn.Parameter(torch.randn(40, E, dtype=torch.float64))

    def forward(self, x, ids, mask):
        S = x.shape[1]
        q = self.q(x)
        r = self.r[:S]
        ac = q @ x.mT
        bd = q @ r.T
        bd = F.pad(bd, (1, 0)).view(x.shape[0], S + 1, S)[:, 1:].reshape(x.shape[0], S, S)
        a = (ac + bd).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -1e9).softmax(-1)
        return a @ x


@module
class Performer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("p", torch.randn(E, 16, dtype=torch.float64))
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x, ids, mask):
        q, k, v = self.qkv(x).chunk(3, -1)

        def phi(t, q):
            u = t @ self.p
            return (
                u
                - t.square().sum(-1, keepdim=True) / 2
                - (u.amax(-1, keepdim=True) if q else u.amax((-1, -2), keepdim=True))
            ).exp() + 1e-4

        q, k = phi(q, True), phi(k, False)
        return (q @ (k.mT @ v)) / (q @ k.sum(1)[..., None])


@module
class NystromLandmarks(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x, ids, mask):
        B, S, _ = x.shape
        m = 4
        p = (-S) % m
        x = F.pad(x, (0, 0, p, 0))
        q, k, v = self.qkv(x).chunk(3, -1)
        n = x.shape[1] // m
        ql, kl = (t.reshape(B, m, n, E).mean(2) for t in (q, k))
        a1 = (q @ kl.mT).softmax(-1)
        a2 = (ql @ kl.mT).softmax(-1)
        a3 = (ql @ k.mT).softmax(-1)
        return (a1 @ torch.linalg.pinv(a2) @ (a3 @ v))[:, -S:]


@module
class SyntAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(E, 32)
        self.v = nn.Linear(E, E)

    def forward(self, x, ids, mask):
        S = x.shape[1]
        return self.a(x)[:, :, :S].softmax(-1) @ self.v(x)


@module
class TalkingHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.t = nn.Linear(4, 4, bias=False)

    def forward(self, x, ids, mask):
        B, S, _ = x.shape
        q, k, v = (t.view(B, S, 4, 2).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        a = q @ k.mT
        a = self.t(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)
        return (a @ v).transpose(1, 2).flatten(2)


@module
class DynConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(E, 3)

    def forward(self, x, ids, mask):
        w = self.w(x).softmax(-1)
        y = F.pad(x, (0, 0, 2, 0))
        S = x.shape[1]
        return sum(w[..., i : i + 1] * y[:, i : i + S] for i in range(3))


@module
class AttnPoolMulti(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Parameter(torch.randn(3, E, dtype=torch.float64))
        self.m = nn.MultiheadAttention(E, 2, batch_first=True)

    def forward(self, x, ids, mask):
        o, w = self.m(self.q.expand(2, -1, -1), x, x, key_padding_mask=mask == 0)
        return o, w


@module
class Mha(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.MultiheadAttention(E, 2, batch_first=True)

    def forward(self, x, ids, mask):
        c = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.m(x, x, x, attn_mask=c, need_weights=False)[0]


@module
class MhaWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.MultiheadAttention(E, 2)

    def forward(self, x, ids, mask):
        y = x.transpose(0, 1)
        o, w = self.m(y, y, y, key_padding_mask=mask == 0)
        return o.transpose(0, 1), w.max(-1).values


@module
class TransformerEnc(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(E, 2, 16, 0.0, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
        )

    def forward(self, x, ids, mask):
        return self.m(x, src_key_padding_mask=mask == 0)


@module
class TransformerDec(nn.Module):
    def __init__(self):
        super().__init__()
        self.m = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, 2, 16, 0.0, batch_first=True), 1)

    def forward(self, x, ids, mask):
        return self.m(
            x,
            x[:, :5].detach(),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype),
            tgt_is_causal=True,
        )
