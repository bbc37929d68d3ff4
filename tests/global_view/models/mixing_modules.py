"""Modules along a sequence as users write them: pools, merges, orders, scans, transforms, images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.global_view.whole import E, V

MODULES: dict[str, type[nn.Module]] = {}


def module(cls: type[nn.Module]) -> type[nn.Module]:
    MODULES[cls.__name__] = cls
    return cls


@module
class HierPool(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.ModuleList([nn.Linear(2 * E, E) for _ in range(2)])

    def forward(self, x, ids, mask):
        outs = []
        for n in self.l:
            if x.shape[1] % 2:
                x = F.pad(x, (0, 0, 0, 1))
            x = n(x.reshape(x.shape[0], x.shape[1] // 2, -1)).relu()
            outs.append(x)
        return outs[-1].mean(1), outs[0]


@module
class ToMe(nn.Module):
    def forward(self, x, ids, mask):
        m = F.normalize(x, dim=-1)
        a, b = m[:, ::2], m[:, 1::2]
        sc = a @ b.transpose(-1, -2)
        r = 3
        nm, ni = sc.max(-1)
        ei = nm.argsort(-1, descending=True)[..., None]
        un, src = ei[:, r:], ei[:, :r]
        dst = ni[..., None].gather(-2, src)
        xs, xd = x[:, ::2], x[:, 1::2]
        n, t1, c = xs.shape
        unm = xs.gather(-2, un.expand(n, t1 - r, c))
        sr = xs.gather(-2, src.expand(n, r, c))
        d = xd.scatter_reduce(-2, dst.expand(n, r, c), sr, reduce="mean")
        return torch.cat([unm, d], 1)


@module
class TopKTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.Linear(E, 1)
        self.f = nn.Linear(E, E)

    def forward(self, x, ids, mask):
        w = self.r(x).squeeze(-1)
        k = 4
        val, idx = w.topk(k, dim=1)
        idx, order = idx.sort(1)
        val = val.gather(1, order)
        ex = idx[..., None].expand(-1, -1, E)
        sel = x.gather(1, ex)
        out = self.f(sel) * val.sigmoid()[..., None]
        return x.scatter_add(1, ex, out)


@module
class MoDInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.r = nn.Linear(E, 1)
        self.f = nn.Linear(E, E)

    def forward(self, x, ids, mask):
        w = self.r(x)[..., 0]
        idx = w.topk(5, dim=1).indices
        y = x.clone()
        b = torch.arange(x.shape[0])[:, None]
        y[b, idx] = y[b, idx] + self.f(x[b, idx]) * w[b, idx][..., None]
        return y


@module
class SortByLength(nn.Module):
    def forward(self, x, ids, mask):
        n = mask.sum(1)
        n, o = n.sort(descending=True)
        y = x[o] * (torch.arange(x.shape[1])[None] < n[:, None])[..., None]
        inv = o.argsort()
        return y[inv]


@module
class MaskedCumsum(nn.Module):
    def forward(self, x, ids, mask):
        m = mask[..., None].to(x.dtype)
        c = (x * m).cumsum(1) / m.cumsum(1).clamp(min=1)
        pos = (mask.cumsum(1) - 1).clamp(min=0)
        return c + pos[..., None], pos


@module
class SegmentSum(nn.Module):
    def forward(self, x, ids, mask):
        seg = (ids == 3).cumsum(1)
        n = int(seg.max()) + 1
        out = torch.zeros(x.shape[0], n, E, dtype=x.dtype).scatter_add(1, seg[..., None].expand_as(x), x)
        cnt = torch.zeros(x.shape[0], n, dtype=x.dtype).scatter_add(1, seg, torch.ones_like(seg, dtype=x.dtype))
        mean = out / cnt.clamp(min=1)[..., None]
        return mean.gather(1, seg[..., None].expand_as(x)) - x


@module
class SegIndexAdd(nn.Module):
    def forward(self, x, ids, mask):
        B, _, _ = x.shape
        flat = (ids + torch.arange(B)[:, None] * V).flatten()
        out = x.new_zeros(B * V, E).index_add_(0, flat, x.reshape(-1, E))
        return out.view(B, V, E)[:, :, :4], out.view(B, V, E)[torch.arange(B)[:, None], ids]


@module
class BinCount(nn.Module):
    def forward(self, x, ids, mask):
        c = torch.bincount(ids.flatten(), minlength=V).to(x.dtype)
        w = torch.bincount(ids.flatten(), weights=x.detach().sum(-1).flatten(), minlength=V)
        f = 1 / c.clamp(min=1).sqrt()
        return x * f[ids][..., None], w


@module
class Histc(nn.Module):
    def forward(self, x, ids, mask):
        h = torch.histc(ids.double(), bins=V, min=0, max=V - 1)
        return x * h[ids][..., None]


@module
class Unique(nn.Module):
    def forward(self, x, ids, mask):
        u, inv, c = torch.unique(ids, return_inverse=True, return_counts=True)
        s_ = torch.zeros(len(u), E, dtype=x.dtype).index_add(0, inv.flatten(), x.flatten(0, 1)) / c[:, None]
        return s_[inv] * x


@module
class ArgmaxSpans(nn.Module):
    def __init__(self):
        super().__init__()
        self.o = nn.Linear(E, 2)

    def forward(self, x, ids, mask):
        a, b = self.o(x).masked_fill(mask[..., None] == 0, -1e4).unbind(-1)
        st, en = a.argmax(1), b.argmax(1)
        sp = (torch.arange(x.shape[1])[None] >= st[:, None]) & (torch.arange(x.shape[1])[None] <= en[:, None])
        return (x * sp[..., None]).sum(1), F.cross_entropy(a, torch.tensor([2, 5])) + F.cross_entropy(
            b, torch.tensor([3, 6])
        )


@module
class Upsample(nn.Module):
    def __init__(self):
        super().__init__()
        self.u = nn.Upsample(scale_factor=2, mode="linear", align_corners=True)

    def forward(self, x, ids, mask):
        y = F.avg_pool1d(x.mT, 2, ceil_mode=True)
        return self.u(y).mT[:, : x.shape[1]] + x


@module
class InterpBack(nn.Module):
    def forward(self, x, ids, mask):
        d = F.interpolate(x.mT, size=5, mode="linear")
        u = F.interpolate(d, size=x.shape[1], mode="nearest")
        return x + u.mT


@module
class FFTMix(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Parameter(torch.randn(E, 2, dtype=torch.float64))

    def forward(self, x, ids, mask):
        S = x.shape[1]
        X = torch.fft.rfft(x, n=2 * S, dim=1)
        w = torch.view_as_complex(self.f)
        return torch.fft.irfft(X * w, n=2 * S, dim=1)[:, :S] + torch.fft.fft2(x).real


@module
class LongConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = nn.Parameter(torch.randn(E, 32, dtype=torch.float64))

    def forward(self, x, ids, mask):
        S = x.shape[1]
        k = self.k[:, :S]
        kf = torch.fft.rfft(k, n=2 * S)
        xf = torch.fft.rfft(x.transpose(1, 2), n=2 * S)
        return torch.fft.irfft(kf * xf, n=2 * S)[..., :S].transpose(1, 2)


@module
class ToImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(E, E, 3, padding=1, groups=E)

    def forward(self, x, ids, mask):
        B, S, _ = x.shape
        h = 3
        p = (-S) % (h * h)
        y = F.pad(x, (0, 0, 0, p))
        n = y.shape[1] // h
        im = y.transpose(1, 2).reshape(B, E, h, n)
        im = self.c(im)
        return im.flatten(2).transpose(1, 2)[:, :S] + x


@module
class ToImages2(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(E, E, 3, padding=1)

    def forward(self, x, ids, mask):
        B, S, _ = x.shape
        S4 = S // 4 * 4
        im = x[:, :S4].view(B, S4 // 4, 4, E).permute(0, 3, 1, 2)
        im = self.c(im)
        return im.permute(0, 2, 3, 1).reshape(B, S4, E)


@module
class SpectralNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(E, E))
        self.w = torch.nn.utils.parametrizations.weight_norm(nn.Linear(E, E))

    def forward(self, x, ids, mask):
        return self.w(self.l(x))


@module
class ShapeFlow(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.ModuleDict({"a": nn.Linear(E, E), "b": nn.Linear(E, E)})

    def forward(self, x, ids, mask):
        cache = {}
        for k, n in self.l.items():
            x = n(x) + cache.get("a", 0)
            cache[k] = x
            if x.size(1) > 14:
                x = x[:, :-1]
                cache = {k: v[:, :-1] for k, v in cache.items()}
        return {"out": x, "n": x.shape[1], "all": list(cache.values())}


@module
class ItemAlike(nn.Module):
    def forward(self, x, ids, mask):
        n = mask.sum(1).max().item()
        k = int((ids > 4).sum())
        y = x[:, :n]
        if (x.mean() > 0).item():
            y = y * 2
        if ids.max().item() > 5:
            y = y / (1 + k)
        return y * float(x.detach().abs().max())


@module
class WhereMany(nn.Module):
    def forward(self, x, ids, mask):
        b, t = torch.where(ids > 6)
        sel = x[b, t]
        b2, t2, e2 = torch.where(x > 1.5)
        z = x[b2, t2, e2]
        return sel.sum(0), z.sum(), torch.stack([b, t])


@module
class AdvIndex(nn.Module):
    def forward(self, x, ids, mask):
        m = mask.bool()
        f = x[m]
        n = f - f.mean(0)
        y = torch.zeros_like(x)
        y[m] = n
        return y, x[m & (ids > 3)].sum(0), x[:, torch.tensor([0, 3, 3, 5])]


@module
class AnyAll(nn.Module):
    def forward(self, x, ids, mask):
        if (ids == 3).any():
            x = x + 1
        if torch.all(mask == 1):
            x = x * 100
        if not mask.all():
            x = x * 2
        r = (ids == 4).any(dim=1)
        a = (x > -9).all(-1).all(-1)
        return x * r[:, None, None], a


@module
class Ckpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(E, E)

    def f(self, x, m):
        return (self.l(x).cumsum(1) * m[..., None]).relu()

    def forward(self, x, ids, mask):
        return checkpoint(self.f, x, mask, use_reentrant=False) + x


@module
class Gau(nn.Module):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(E, 2 * E + 4)
        self.g = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))
        self.o = nn.Linear(E, E)

    def forward(self, x, ids, mask):
        u, v, b = F.silu(self.i(x)).split([E, E, 4], -1)
        q, k = (b[..., None, :] * self.g).unbind(-2)
        a = F.relu(q @ k.mT / x.shape[1]) ** 2
        a = a.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), 0.0)
        return self.o(u * (a @ v))
