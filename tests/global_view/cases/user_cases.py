"""What users write by hand along a sequence, as functions of one device: segments, spans, rows of several lengths, windows, orders, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from tests.global_view.whole import Case, E, Whole

USER_CASES: dict[str, Case] = {}


def case(function: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor, Tensor], Any]:
    def run(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
        return function(F.linear(x, w.weight), ids, mask)

    USER_CASES[function.__name__.replace("_", " ")] = run
    return function


@case
def scatter_zeros_like(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return torch.zeros_like(x).scatter(1, ids[..., None].expand_as(x), x.detach() * 0 + 1), torch.zeros_like(
        x
    ).scatter_add(1, ids[..., None].expand_as(x), x)


@case
def scatter_reduce_zeros(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return torch.zeros_like(x).scatter_reduce(1, ids[..., None].expand_as(x), x, "amax"), x.clone().scatter_(
        1, ids[:, :3, None].expand(-1, -1, E), 0.0
    )


@case
def normalize_dim1(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return F.normalize(x, dim=1), F.normalize(x, p=1.0, dim=1), F.normalize(x)


@case
def cos_dim1(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return F.cosine_similarity(x, x.flip(1), dim=1), F.cosine_similarity(x.mT, x.mT.sin(), dim=-1)


@case
def median_all(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return (
        x.median(),
        x.quantile(0.3),
        torch.quantile(x, torch.tensor([0.1, 0.9], dtype=x.dtype)),
        x.nanmedian(),
        torch.quantile(x, torch.tensor([0.1, 0.9], dtype=x.dtype), dim=1),
    )


@case
def diff_prepend(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return (
        torch.diff(x, dim=1, prepend=x[:, :1]),
        torch.diff(x, dim=1, append=x.new_zeros(2, 1, E)),
        torch.diff(ids, prepend=torch.zeros(2, 1, dtype=ids.dtype)),
        torch.diff(x, n=2, dim=1),
    )


@case
def write_list(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    y = x * 1
    y[:, [0, 4]] = 1
    y[:, torch.tensor([2, 5])] = x[:, [3, 1]]
    y[:, [6], :2] = 7.0
    return y


@case
def write_list2(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    y = x * 1
    y[[0, 1], [2, 3]] = 5.0
    y[0, [1, 2]] = x[1, :2]
    y[:, -2:] = 0
    y[:, :, [0, 3]] = y[:, :, [3, 0]]
    return y


@case
def einops_like(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    B, S, _ = x.shape
    w = S // 4 * 4
    y = x[:, :w].reshape(B, 4, w // 4, E)
    z = y.permute(0, 2, 1, 3).reshape(B, w // 4, 4 * E)
    u = z.view(B, w // 4, 4, 2, 4).transpose(1, 2).reshape(B * 4, w // 4, E)
    return z, u, u.mean(1)


@case
def strided_dilated(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    B, S, _ = x.shape
    r = 2
    p = (-S) % r
    y = F.pad(x, (0, 0, 0, p)).view(B, -1, r, E).transpose(1, 2).reshape(B * r, -1, E)
    o = F.scaled_dot_product_attention(y, y, y)
    return o.view(B, r, -1, E).transpose(1, 2).reshape(B, -1, E)[:, :S]


@case
def swin(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    B, S, _ = x.shape
    w = 4
    S2 = S // w * w
    y = torch.roll(x[:, :S2], -2, 1)
    win = y.view(B, S2 // w, w, E).reshape(-1, w, E)
    a = (win @ win.transpose(-2, -1)).softmax(-1) @ win
    return torch.roll(a.view(B, S2 // w, w, E).reshape(B, S2, E), 2, dims=1)


@case
def sliding_chunks(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    S = x.shape[1]
    w = 2
    S2 = S // (2 * w) * 2 * w
    y = x[:, :S2]
    c = y.unfold(1, 2 * w, w).transpose(-1, -2)
    sc = torch.einsum("bcxd,bcyd->bcxy", c, c).softmax(-1)
    return torch.einsum("bcxy,bcyd->bcxd", sc, c)


@case
def lambda_pool(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    mx = x.masked_fill(mask[..., None] == 0, -torch.inf).max(1)
    mn = x.masked_fill(mask[..., None] == 0, torch.inf).min(1).values
    return (
        mx.values,
        mx.indices,
        mn,
        (x * mask[..., None]).pow(2).sum(1).sqrt(),
        x.std(1, correction=0),
        x.mean((1, 2)),
        x.amax((0, 1)),
        x.norm(dim=(1, 2)),
        x.sum(),
        x.argmax(),
        x.argmin(1),
        x.max(),
        x.min(0).values,
    )


@case
def gem(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return x.clamp(min=1e-6).pow(3).mean(1).pow(1 / 3), F.lp_pool1d(x.mT.abs() + 0.1, 3, x.shape[1])


@case
def softplus_scan(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return (
        F.softplus(x).cumsum(1).neg().exp().cumprod(1),
        x.cummax(1).values,
        x.flip(1).cumsum(1).flip(1),
        x.cumsum(-1)[:, -1],
    )


@case
def stack_pairs(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    a = x[:, :, None] + x[:, None]
    return a.tanh().mean(2), (x[:, :, None] - x[:, None]).pow(2).sum(-1).neg().exp() @ x


@case
def outer_biaffine(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return (
        torch.einsum("bxi,byi->bxy", x, x.sin()).diagonal(dim1=1, dim2=2),
        (x @ x.mT).triu(1).sum((1, 2)),
        (x @ x.mT).flatten(1).softmax(1),
    )


@case
def crf(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    T = torch.linspace(-1, 1, E * E, dtype=x.dtype).view(E, E)
    a = x[:, 0]
    for t in range(1, x.shape[1]):
        n = torch.logsumexp(a[:, :, None] + T + x[:, t, None], 1)
        a = torch.where(mask[:, t, None].bool(), n, a)
    return (
        a.logsumexp(-1),
        x.gather(2, (ids % E)[..., None]).squeeze(-1).sum(1),
        T[(ids % E)[:, :-1], (ids % E)[:, 1:]].sum(1),
    )


@case
def viterbi(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    s = x[:, 0]
    bp = []
    for t in x.unbind(1)[1:]:
        s, b = (s[:, :, None] + t[:, None]).max(1)
        bp.append(b)
    return s, torch.stack(bp, 1)


@case
def ngram(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    h = ids.clone()
    for k in (1, 2):
        h = h * 31 + F.pad(ids, (k, 0))[:, :-k]
    return (
        x * (h % 97)[..., None],
        (ids[:, 1:] == ids[:, :-1]).sum(1),
        torch.where(ids == F.pad(ids[:, :-1], (1, 0), value=-1), 0, ids),
    )


@case
def segment_pos(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    st = (ids == 3).long()
    seg = st.cumsum(1)
    p = torch.arange(ids.shape[1]).expand_as(ids)
    last = torch.where(st.bool(), p, 0).cummax(1).values
    rel = p - last
    mask = seg[:, :, None] == seg[:, None]
    mask = mask & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    return (
        x * rel[..., None],
        F.scaled_dot_product_attention(*[x.unflatten(2, (2, 4)).transpose(1, 2)] * 3, attn_mask=mask[:, None]),
        ((x @ x.mT).masked_fill(~mask, -1e9).softmax(-1) @ x),
    )


@case
def repeat_interleave_len(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    d = ids[0] % 3
    y = torch.repeat_interleave(x[0], d, dim=0)
    return y, d.sum()


@case
def functions_of_positions(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """Documents and padding as a mask function of FlexAttention reads them: torch.vmap calls it with all positions."""
    documents, length = (ids % 3 == 0).cumsum(1), ids.shape[1]

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (
            (documents[row, query] == documents[row, key]) & (key <= query) & (mask[row, key].bool() | (key == query))
        )

    made = create_mask(visible, 2, 1, length, length, device="cpu")
    q = x.view(2, length, 4, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q.sin(), q, attn_mask=made)


@case
def positions_mapped_by_hand(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    """The same by nested torch.vmap, whose positions index as plain tensors do."""
    documents, length = (ids % 3 == 0).cumsum(1), ids.shape[1]

    def visible(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[row, query] == documents[row, key]) & (key <= query)

    of_keys = torch.vmap(visible, in_dims=(None, None, 0))
    mapped = torch.vmap(torch.vmap(of_keys, in_dims=(None, 0, None)), in_dims=(0, None, None))
    made = mapped(torch.arange(2), torch.arange(length), torch.arange(length)).unsqueeze(1)
    q = x.view(2, length, 4, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q.sin(), q, attn_mask=made)
