"""What users write into tensors and make of tokens' scores, experts, states and statistics along a sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.global_view.cases.more_user_cases import MORE_USER_CASES
from tests.global_view.cases.user_cases import case
from tests.global_view.whole import E, V

WRITTEN_CASES = MORE_USER_CASES  # with those that follow


@case
def alias_view(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    y = x.clone()
    v = y.view(x.shape[0], x.shape[1], 2, 4)
    v[..., 0].mul_(3)
    y.transpose(1, 2).add_(1)
    h = y[..., :4]
    h *= 2
    return y


@case
def alias_flat(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    y = x.clone()
    f = y.view(-1, E)
    f[ids.flatten() == 3] = 0
    f.clamp_(min=-1)
    r = y.reshape(-1)
    r.mul_(2)
    return y


@case
def alias_rows(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    y = x.clone()
    for b in range(2):
        y[b].mul_(b + 2)
        y[b][:, :2] = 0
    y[1] += 1
    return y


@case
def inplace_scatter_views(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    y = torch.zeros_like(x)
    y.scatter_add_(2, (ids % E)[..., None].expand(-1, -1, 3), x[..., :3])
    y.index_fill_(2, torch.tensor([1]), 4.0)
    y.index_fill_(1, torch.tensor([1]), 5.0)
    z = y.clone()
    z.index_copy_(1, torch.tensor([0, 3]), x[:, [1, 2]])
    z.index_add_(1, torch.tensor([0, 0]), x[:, [1, 2]])
    return y, z


@case
def expand_write(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    p = torch.zeros(x.shape[1], E, dtype=x.dtype)
    p[:, 0::2] = torch.sin(torch.arange(x.shape[1], dtype=x.dtype))[:, None]
    p = p[None].expand(2, -1, -1).clone()
    p[0] = 1
    return x + p


@case
def mask_build(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    S = x.shape[1]
    a = torch.zeros(2, 1, S, S, dtype=x.dtype)
    a.masked_fill_(mask[:, None, None, :] == 0, -1e9)
    c = torch.full((S, S), float("-inf")).triu(1).to(x.dtype)
    q = x.view(2, S, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=(a + c)), ((q @ q.mT) / 2 + a + c).softmax(-1) @ q


@case
def mask_build2(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    S = x.shape[1]
    a = mask[:, None, :] * mask[:, :, None]
    a = torch.tril(a)
    a = a.bool() | torch.eye(S, dtype=torch.bool)
    q = x.view(2, S, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=a[:, None]), (q @ q.mT).masked_fill(
        a[:, None] == 0, -1e9
    ).softmax(-1) @ q


@case
def eye_diag(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    S = x.shape[1]
    s = x @ x.mT
    s = s.masked_fill(torch.eye(S, dtype=torch.bool), -1e9)
    w = s.softmax(-1)
    return w @ x, s.argmax(-1), (w * torch.eye(S)).sum()


@case
def scores_misc(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    s = x @ x.mT / 3
    a = s.softmax(-1)
    b = s.softmax(1)
    c = s.sigmoid() / x.shape[1]
    d = s.relu()
    return (
        a @ x,
        b @ x,
        c @ x,
        d @ x,
        s.mean(),
        s.max(-1).values,
        a.sum(1),
        (a * a).sum(),
        s.transpose(1, 2).softmax(-1) @ x,
        s.log_softmax(-1).exp() @ x,
    )


@case
def scores_cat(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    s = torch.cat([x @ x[:, :3].mT, x @ x.mT], -1)
    v = torch.cat([x[:, :3], x], 1)
    return s.softmax(-1) @ v


@case
def kv_cache(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    k = torch.cat([x[:, :0], x], 1)
    S = x.shape[1]
    o = []
    for t in range(0, S, 5):
        q = x[:, t : t + 5]
        kk = k[:, : t + 5]
        s = q @ kk.mT
        n = q.shape[1]
        msk = torch.arange(kk.shape[1])[None] > (t + torch.arange(n))[:, None]
        o.append(s.masked_fill(msk, -torch.inf).softmax(-1) @ kk)
    return torch.cat(o, 1)


@case
def multi_scale(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    o = []
    for k in (1, 2, 4):
        y = F.avg_pool1d(F.pad(x.mT, (0, (-x.shape[1]) % k)), k).mT
        o.append(y.repeat_interleave(k, 1)[:, : x.shape[1]])
    return torch.stack(o, -1).softmax(-1).sum(-1), torch.cat(o, -1)


@case
def patchify(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    S = x.shape[1] // 4 * 4
    p = x[:, :S].unflatten(1, (-1, 4)).flatten(2)
    cls = p.new_zeros(2, 1, p.shape[-1])
    z = torch.cat([cls, p], 1)
    z = z + torch.arange(z.shape[1], dtype=x.dtype)[None, :, None]
    return z[:, 0], z[:, 1:].unflatten(2, (4, E)).flatten(1, 2), z.mean(1)


@case
def mae(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    B, S, _ = x.shape
    n = torch.linspace(0, 1, B * S, dtype=x.dtype).mul(37).sin().view(B, S)
    sh = n.argsort(1)
    re = sh.argsort(1)
    k = S // 2
    kept = x.gather(1, sh[:, :k, None].expand(-1, -1, E))
    full = torch.cat([kept, torch.zeros(B, S - k, E, dtype=x.dtype)], 1).gather(1, re[..., None].expand(-1, -1, E))
    mk = torch.ones(B, S, dtype=x.dtype)
    mk[:, :k] = 0
    mk = mk.gather(1, re)
    return full, ((full - x) ** 2).mean(-1).mul(mk).sum() / mk.sum()


@case
def vq(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    c = torch.linspace(-1, 1, 5 * E, dtype=x.dtype).view(5, E)
    d = torch.cdist(x, c)
    k = d.argmin(-1)
    q = c[k]
    q = x + (q - x).detach()
    oh = F.one_hot(k, 5).to(x.dtype).flatten(0, 1)
    p = oh.mean(0)
    return q, (-(p * (p + 1e-9).log()).sum()).exp(), (x.detach() - q).square().mean()


@case
def ema_buffer_like(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    n = torch.bincount(ids.flatten(), minlength=V).to(x.dtype)
    dw = F.one_hot(ids, V).to(x.dtype).flatten(0, 1).T @ x.flatten(0, 1)
    return dw / n.clamp(min=1)[:, None]


@case
def moe_capacity(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    f = x.flatten(0, 1)
    g = f[:, :3].softmax(-1)
    e = g.argmax(-1)
    oh = F.one_hot(e, 3)
    pos = (oh.cumsum(0) * oh).sum(-1) - 1
    keep = pos < 5
    out = torch.zeros_like(f)
    for k in range(3):
        s = (e == k) & keep
        out[s] = f[s] * (k + 1) * g[s][:, k : k + 1]
    return out.view_as(x), (oh.double().mean(0) * g.mean(0)).sum() * 3


@case
def moe_sorted(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    f = x.reshape(-1, E)
    e = ids.flatten() % 3
    o = e.argsort(stable=True)
    s = f[o]
    n = torch.bincount(e, minlength=3).tolist()
    parts = [p * (k + 1) for k, p in enumerate(s.split(n))]
    y = torch.cat(parts)
    out = torch.empty_like(y)
    out[o] = y
    return out.view_as(x)


@case
def expert_choice(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    g = x[..., :3].softmax(-1)
    w, idx = g.transpose(1, 2).topk(4, -1)
    xs = torch.einsum("bekt,btd->bekd", F.one_hot(idx, x.shape[1]).to(x.dtype), x)
    y = xs * w[..., None]
    return torch.einsum("bekt,bekd->btd", F.one_hot(idx, x.shape[1]).to(x.dtype), y)


@case
def slots(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    q = torch.linspace(-1, 1, 3 * E, dtype=x.dtype).view(1, 3, E).expand(2, -1, -1)
    for _ in range(2):
        a = (q @ x.mT).softmax(1) + 1e-8
        a = a / a.sum(-1, keepdim=True)
        q = q + a @ x
    return q, a


@case
def memory_rec(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    M = torch.zeros(2, E, E, dtype=x.dtype)
    o = []
    for c in x.split(4, 1):
        o.append(c @ M)
        M = M * 0.9 + c.mT @ c
    return torch.cat(o, 1), M


@case
def delta_rule(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    S = torch.zeros(2, E, E, dtype=x.dtype)
    o = []
    k = F.normalize(x, dim=-1)
    for t in range(x.shape[1]):
        kt = k[:, t]
        v = x[:, t] - torch.einsum("bij,bi->bj", S, kt)
        S = S + torch.einsum("bi,bj->bij", kt, v)
        o.append(torch.einsum("bij,bi->bj", S, kt))
    return torch.stack(o, 1)


@case
def ssd_segsum(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    x = x / 8
    a = x[..., 0].neg().exp().neg()
    S = x.shape[1]
    c = a.cumsum(1)
    seg = c[:, :, None] - c[:, None, :]
    L = seg.masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), -torch.inf).exp()
    return torch.einsum("bts,bse->bte", L * (x @ x.mT), x)


@case
def rope_half_real(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    p = (mask.cumsum(1) - 1).clamp(min=0)
    inv = 1 / 10000 ** (torch.arange(0, 4, dtype=x.dtype) / 4)
    f = p[..., None] * inv
    cs = torch.cat([f, f], -1).cos()
    sn = torch.cat([f, f], -1).sin()
    x1, x2 = x.split(4, -1)
    return x * cs + torch.cat([-x2, x1], -1) * sn, torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(f), f)
    ).flatten(-2)


@case
def batch_reorder(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    o = torch.tensor([1, 0])
    return (
        x[o],
        x.flip(0),
        x.roll(1, 0),
        torch.cat([x, x.detach()], 0).mean(0),
        x[0] - x[1],
        x.sum(0),
        torch.stack([x[1], x[0]]),
        x[:1].expand(2, -1, -1),
        x[torch.randperm(2, generator=torch.Generator().manual_seed(1))],
    )


@case
def dtype_promote(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return (
        x * ids[..., None],
        ids / 2,
        ids // 3,
        ids.float().mean(),
        (x > 0).sum(1),
        (x > 0) & (ids > 2)[..., None],
        ids % 3 == 0,
        x.int().sum(1),
        mask.sum().double() * x.mean(),
        ids.max(1).values,
        ids.float().std(1),
        ids.unique().double().sum(),
        ids.sort(1).values,
        (ids + 1).prod(1),
    )


@case
def einsum_more(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    w = torch.linspace(-1, 1, E * E, dtype=x.dtype).view(E, E)
    return (
        torch.einsum("bsd,bse->bde", x, x),
        torch.einsum("b s d, d e -> b e s", x, w),
        torch.einsum("bsd,bsd->b", x, x),
        torch.einsum("bsd->sd", x),
        torch.einsum("bsd,btd->st", x, x),
        torch.einsum("sd,td->st", x[0], x[1]),
        torch.einsum("...d,ed->...e", x, w),
        torch.einsum("bsd,s->bd", x, torch.arange(x.shape[1], dtype=x.dtype)),
    )


@case
def norm_axis(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return (
        (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt(),
        x / x.norm(dim=(1, 2), keepdim=True),
        (x - x.amin(1, keepdim=True)) / (x.amax(1, keepdim=True) - x.amin(1, keepdim=True) + 1e-6),
        x / x.abs().max(),
        x.softmax(1),
        x.logsumexp((1, 2)),
        x.softmax(-1).log().sum((0, 1)),
    )


@case
def cond_lengths(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    lengths = mask.sum(1)
    r = torch.arange(x.shape[1])
    mk = r[None] < lengths[:, None]
    rel = (r[None] - lengths[:, None]).clamp(max=0)
    w = torch.where(mk, 1 / lengths[:, None], 0.0)
    return (
        (x * w[..., None]).sum(1),
        x[torch.arange(2), (lengths - 1).clamp(min=0)],
        (x * rel[..., None]).mean(),
        x.masked_fill(~mk[..., None], 0).cumsum(1).gather(1, (lengths - 1)[:, None, None].expand(-1, 1, E)),
    )


@case
def scores_under_autocast(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """Whole numbers, which bfloat16 holds; scores that are made are as many for each query as there are keys."""
    q = (ids % 3).float()[..., None].expand(-1, -1, 4)
    hides = (torch.arange(x.shape[1]) > 2).expand(x.shape[1], -1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = q @ q.transpose(-2, -1)
        weights = scores.softmax(-1)
        out = weights @ q
        low = torch.where(hides, torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype), scores)
        made = low.float().relu().square()
    bits = [torch.finfo(each.dtype).bits for each in (scores, weights, out)]
    return x * bits[0], x * bits[1], x * bits[2], made.double().sum(-1)[..., None] * x
