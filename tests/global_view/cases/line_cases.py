"""What goes along the sequence by whole lines, or is left of them: scans, orders, windows, pools, transforms, recurrent layers, norms."""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.global_view.whole import Case, E, V, Whole


def orders(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    return (
        x.sort(dim=1, descending=True),
        x.gather(1, x.argsort(1)),
        (x.median(1), x.nanmedian(1), x.mode(1), x.kthvalue(2, dim=1, keepdim=True)),
        (x.topk(3, dim=1), x.quantile(0.3, dim=1), x.quantile(0.5, dim=1, keepdim=True)),
    )


def pools(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    y = x.mT
    return (
        F.max_pool1d(y, 3, stride=2, padding=1),
        F.max_pool1d(y, 2, return_indices=True),
        F.avg_pool1d(y, 3, stride=1, padding=1),
        F.lp_pool1d(y.abs() + 0.1, 2, 2),
        F.avg_pool1d(x, 2),
        F.max_pool2d(x[:, None], 2),
        F.avg_pool2d(x[:, None], (2, 1), stride=(2, 1), ceil_mode=True),
        F.max_pool2d(y[:, None], (1, 3)),
        F.interpolate(y, scale_factor=2, mode="nearest"),
        F.interpolate(y, size=7, mode="linear", align_corners=False),
        F.interpolate(x[:, None], scale_factor=(0.5, 2.0), mode="bilinear"),
    )


def transforms(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    back = torch.fft.irfft(torch.fft.rfft(x, dim=1), n=x.shape[1], dim=1)
    complexes = (
        torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1), torch.fft.rfft(x, dim=1, norm="ortho"), torch.fft.rfft2(x),
        torch.fft.fft2(x), torch.fft.fftn(x), torch.fft.rfftn(x, dim=(1,)),
    )  # fmt: skip
    return [*map(torch.view_as_real, complexes), back * x, torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[1:])]


def recurrent(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        gru = nn.GRU(E, E, batch_first=True, bidirectional=True, dtype=x.dtype)
        lstm, rnn = nn.LSTM(E, 4, 2, dtype=x.dtype), nn.RNN(E, E, batch_first=True, dtype=x.dtype)
        letters, late = nn.LSTM(2, 3, batch_first=True, bidirectional=True, dtype=x.dtype), nn.GRU(2, 3, dtype=x.dtype)
    words = x.reshape(-1, 4, 2)  # four letters each
    return (
        gru(x), lstm(x.transpose(0, 1)), rnn(x, w.rows[None].contiguous()),
        letters(words), late(words.transpose(0, 1), letters(words)[0][None, :, 0, :3]),
    )  # fmt: skip


def strided(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    y, square = x.mT, w.full_kernel.reshape(-1)[:36].view(4, 1, 3, 3)
    return (
        F.conv1d(y, w.full_kernel, w.bias, stride=2),
        F.conv1d(y, w.kernel, stride=3, padding=1, groups=E),
        F.conv1d(y, w.full_kernel, padding="same", dilation=2),
        F.conv_transpose1d(y, w.full_kernel, w.bias, stride=2, padding=1, output_padding=1),
        F.conv_transpose1d(y, w.kernel, groups=E, dilation=2),
    ), (
        F.conv2d(x[:, None], square, padding=1),
        F.conv2d(x[:, None], square[:, :, :, :1], padding=(1, 0), stride=(2, 1)),
        F.conv2d(y[:, None], square, dilation=(1, 2), padding=(0, 2)),
        F.conv2d(x.view(2, -1, 2, 4).transpose(1, 2), square[:2, :, :, :1], padding=(1, 0), groups=2),
    )


def frames(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """A fourth as many frames as tokens, that attend to each other, as of sounds; then as many as tokens again."""
    y = F.conv1d(x.mT, w.full_kernel, w.bias, stride=4).mT
    heads = y.unflatten(-1, (2, -1)).transpose(1, 2)
    out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2) + y
    written = (heads @ heads.mT + w.bias[: y.shape[1]]).softmax(-1) @ heads
    again = F.interpolate(F.avg_pool1d(out.mT, 2), size=x.shape[1]).mT + x
    return out, written, again, torch.cat([x, out], 1), out[:, 1:] * y[:, :-1], y.mean(1), out[:, -1] + x[:, 0]


def norms(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    y, middle, variance = x.mT, torch.zeros(E, dtype=x.dtype), torch.ones(E, dtype=x.dtype)
    return (
        F.batch_norm(y, middle, variance, w.bias, w.bias, True, 0.1),
        (middle.clone(), variance.clone()),
        F.batch_norm(y, middle, variance, None, None, False),
        F.batch_norm(x.flatten(0, 1), None, None, w.bias, w.bias, True),
        F.group_norm(y, 4, w.bias, w.bias),
        F.instance_norm(y, weight=w.bias, bias=w.bias),
        F.layer_norm(x, x.shape[1:], w.positions, w.positions),
        F.layer_norm(y, (x.shape[1],)),
        F.prelu(x, w.bias[:1]) + F.prelu(y, w.bias).mT,
    )


def statistics(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    holes = x.masked_fill(ids[..., None] == 3, math.nan)
    return (
        (torch.std_mean(x, dim=1), torch.var_mean(x, 1, keepdim=True), torch.std_mean(x)),
        (holes.nansum(1), holes.nanmean(1), torch.aminmax(_given_to_aminmax(x), dim=1), x.prod(1), x.prod(2)),
    )


def _given_to_aminmax(x: Tensor) -> Tensor:
    """Return a tensor of which torch's function takes a gradient, if it takes any: torch 2.11's takes none."""
    least = torch.aminmax(torch.zeros(1, requires_grad=True))[0]
    try:
        least.backward()
    except RuntimeError:
        return x.detach()
    return x


def repeated(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    often = torch.arange(x.shape[1]) % 3
    return x.repeat(1, 3, 2), x.repeat_interleave(2, dim=1), x.repeat(2, 1, 2, 1), x.repeat_interleave(often, dim=1)


def added_up(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    flat, wide = ids.flatten(), ids[..., None].expand(-1, -1, E)
    classes = (torch.arange(x.shape[1]) % V)[None, :, None].expand(2, -1, E)

    def empty(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=x.dtype)

    return (
        empty(V, E).index_add(0, flat, x.flatten(0, 1)),
        empty(V, E).index_add_(0, flat, x.flatten(0, 1), alpha=2),
        empty(2, V, E).scatter_add_(1, wide, x),
        empty(2, V, E).scatter_add(1, classes, x),
        empty(2, V).scatter_(1, ids, 1.0),
    )


def scattered(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """Tokens merged into others, as ToMe does; the largest and the mean of segments; tokens written by an index."""
    some, others = x[:, ::2][:, :5], x[:, 1::2]
    near = (F.normalize(some, dim=-1) @ F.normalize(others, dim=-1).mT).argmax(-1)[..., None].expand(-1, -1, E)
    segments = (ids < 3).cumsum(1)[..., None].expand(-1, -1, E)
    largest = torch.ones(2, x.shape[1] + 1, E, dtype=x.dtype)
    largest.scatter_reduce_(1, segments, x, "amax")
    places = torch.tensor([2, 4]).view(1, 2, 1).expand(2, -1, E)
    return (
        others.scatter_reduce(1, near, some, "mean"),
        others.scatter_add(1, near, some),
        torch.zeros_like(largest).scatter_reduce(1, segments, x, "mean", include_self=False),
        largest,
        x.scatter(1, places, 0.5),
        x.scatter(1, places, w.rows[:, None].expand(-1, 2, -1)),
    )


def of_all_rows(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    flat = F.normalize(x, dim=-1).flatten(0, 1)
    logps = F.linear(flat, w.head)[:-1].log_softmax(-1)
    return flat @ flat.T / 0.5, torch.cdist(x, x), logps.gather(1, ids.view(-1)[1:, None]), flat[3:20:2]


def one_chunk(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """A scan by chunks of which the sequence fills one, and its heads back beside each other."""
    b, s, _ = x.shape
    q = F.pad(x.view(b, s, 4, 2).transpose(1, 2), (0, 0, 0, 64 - s)).reshape(b, 4, -1, 64, 2)
    out = torch.zeros_like(q)
    out[:, :, 0] = ((q @ q.mT).tril() @ q)[:, :, 0]
    out = out.reshape(b, 4, -1, 2)[:, :, :s].transpose(1, 2).contiguous()
    gated = out.reshape(-1, 2) * x.view(b, s, 4, 2).reshape(-1, 2)
    return F.linear(gated.reshape(b, s, 4, 2).reshape(b, s, -1), w.weight)


def other_orders(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """Joined rows, tokens joined with features, and blocks that were exchanged with what they hold."""
    flat = x.flatten(0, 1)
    return (
        x[:, :12].reshape(2, 3, 4, E).transpose(1, 2).reshape(2, 12, E) * x[:, :12],
        flat.flip(0) * flat.roll(3, 0),
        x.transpose(0, 1).reshape(-1, E) * flat,
        (flat.cumprod(0), x.flatten(1).sort(1), flat.sort(0)),
    )


def padded_otherwise(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    y = x.mT
    return (
        F.pad(y, (2, 3), mode="reflect"), F.pad(y, (1, 2), mode="circular"), F.pad(y, (2, 0), mode="replicate"), x.roll((1, 2), (1, 2)),
    )  # fmt: skip


def written_by_numbers(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    first, second, third = x * 2, x.clone(), x.clone()
    first[torch.arange(2), mask.sum(1) - 1] = w.rows
    second[:, torch.tensor([1, 4])] = 0.25
    third[torch.tensor([0, 1]), torch.tensor([2, 7]), torch.tensor([1, 1])] = 3.0
    places = (torch.tensor([0, 1]), torch.tensor([3, 5]))
    filled = x.index_fill(1, torch.tensor([1, 4]), 0.5) * x.index_fill(2, torch.tensor([1]), 0.5)
    beside = x.unflatten(2, (2, -1)).transpose(1, 3) * 2  # (rows, features, heads, tokens), as Longformer's scores
    beside[torch.tensor([0, 1, 1]), torch.tensor([2, 0, 1]), :, :] = 0.75
    return first.sin(), second.sin(), third, x.index_put(places, w.rows), filled, beside.transpose(1, 3)


def triangles(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    return (
        torch.tril(x @ x.mT) @ x,
        torch.triu(x * 2, 1),
        (x @ x.mT).softmax(-1).diagonal(dim1=1, dim2=2),
        x.view(2, -1, 2, 4).diagonal(dim1=2, dim2=3),
        torch.einsum("bse,ef,btf->bst", x, w.weight, x).logsumexp(-1),
        torch.tensordot(x, x, dims=([0, 1], [0, 1])),
    )


def attention_written_into(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """One device saves no product of weights and values for its backward."""
    q = F.linear(x, w.weight)
    out = (q @ x.mT).softmax(-1) @ x
    out += q.sin()
    return out.mul_(2)


def relative_shift(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Scores of distances, skewed to those of keys, as in Transformer-XL, XLNet and Funnel: rows are taken apart."""
    b, s, _ = x.shape
    q = F.linear(x, w.weight).view(b, s, 4, 2).transpose(1, 2)
    distances = torch.cat([w.positions, w.positions.flip(0)]).view(2 * s, 4, 2)
    far = torch.einsum("bnid,tnd->bnit", q, distances)
    far = far.reshape(b, 4, 2 * s, s)[:, :, 1:, :].reshape(b, 4, s, 2 * s - 1)[..., :s]
    scores = torch.einsum("bnid,bnjd->bnij", q, q.cos()) + far
    return (scores.masked_fill(mask[:, None, None] == 0, -1e30).softmax(-1) @ q).transpose(1, 2).flatten(2)


def shift_of_tokens_first(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """The same where tokens come first, (S, T, B, H), as Transformer-XL is written: rows and heads stay behind what is taken apart."""
    b, s, _ = x.shape
    q = F.linear(x, w.weight).view(b, s, 4, 2).transpose(0, 1)
    far = torch.einsum("ibnd,jnd->ijbn", q, w.positions.flip(0)[:s].view(s, 4, 2))
    padded = torch.cat([torch.zeros_like(far[:, :1]), far], dim=1).view(s + 1, s, b, 4)
    scores = torch.einsum("ibnd,jbnd->ijbn", q, q.cos()) + padded[1:].view_as(far)
    return torch.einsum("ijbn,jbnd->ibnd", scores.softmax(1), q).flatten(2)


def blocks_that_are_chosen(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Blocks times those that whole numbers choose of all rows' blocks, as BigBird's random attention is written."""
    b, s, _ = x.shape
    blocks = F.pad(x, (0, 0, 0, -s % 4)).view(b, -1, 4, E)
    count = blocks.shape[1]
    at = (torch.arange(b * count, device=x.device) * 3 + 1) % (b * count)
    others = blocks.reshape(-1, 4, E).index_select(0, at).view(b, count, 4, E)
    weights = torch.einsum("bnqd,bnkd->bnqk", blocks, others).softmax(-1)
    return torch.einsum("bnqk,bnkd->bnqd", weights, others.sin()).reshape(b, -1, E)[:, :s]


def negatives(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Tokens of a strided convolution beside those that whole numbers choose of all rows, as wav2vec 2.0 contrasts them."""
    y = F.conv1d(x.mT, w.full_kernel, stride=2).mT
    b, s, _ = y.shape
    at = (torch.arange(b * s * 3, device=x.device) * 5 + 2) % (b * s)
    others = y.reshape(-1, E)[at].view(b, s, 3, E).permute(2, 0, 1, 3)
    beside = torch.cat([y.unsqueeze(0), others], 0)
    same = (y == others).all(-1)
    return torch.cosine_similarity(y.sin().unsqueeze(0), beside, dim=-1)[1:].masked_fill(same, 0.5)


def cache_of_keys(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Chunks that attend to a cache into which each has put its own tokens."""
    cache, out = torch.zeros(2, x.shape[1] + 3, E, dtype=x.dtype, device=x.device), []
    for start in range(0, x.shape[1], 5):
        chunk = x[:, start : start + 5]
        at = torch.arange(start, start + chunk.shape[1], device=x.device)
        cache = cache.index_copy(1, at, chunk.sin())
        hidden = torch.arange(cache.shape[1], device=x.device) > at[:, None]
        out.append((chunk @ cache.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ cache)
    return torch.cat(out, 1)


def _symmetric(pairs: Tensor) -> Tensor:
    return pairs + 2 * pairs.transpose(1, 2)


def distributions(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    kinds = torch.distributions
    return (
        kinds.Normal(x, 1.0).log_prob(x.sin()),
        kinds.Categorical(logits=F.linear(x, w.head)).log_prob(ids),
        kinds.kl_divergence(kinds.Normal(x, 1.0), kinds.Normal(0.0, 1.0)),
        torch.special.entr(x.sigmoid()) + F.logsigmoid(x),
        F.pairwise_distance(x[:, 1:], x[:, :-1]),
        torch.bucketize(x.detach(), torch.linspace(-1, 1, 5, dtype=x.dtype)),
    )


def aligned_with_labels(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    logps = F.linear(x, w.head).log_softmax(-1).transpose(0, 1)
    labels, count = torch.arange(10).view(2, 5) % 9 + 1, torch.tensor([5, 3])
    joined = torch.cat([labels[0], labels[1, :3]])
    return (
        F.ctc_loss(logps, labels, mask.sum(1), count),
        F.ctc_loss(logps, joined, mask.sum(1), count, reduction="sum", zero_infinity=True),
        F.ctc_loss(logps, joined, tuple(mask.sum(1).tolist()), (5, 3), reduction="none"),
    )


LINE_CASES: dict[str, Case] = {
    "order of tokens": orders,
    "pools": pools,
    "Fourier transforms": transforms,
    "recurrent layers": recurrent,
    "strided convolutions": strided,
    "frames of a strided convolution": frames,
    "norms over the sequence": norms,
    "statistics": statistics,
    "repeated sequences": repeated,
    "added up by class": added_up,
    "tokens scattered": scattered,
    "all rows' tokens": of_all_rows,
    "scan by one chunk": one_chunk,
    "sequences in other orders": other_orders,
    "padding of other kinds": padded_otherwise,
    "written by numbers": written_by_numbers,
    "triangles and diagonals": triangles,
    "attention that is written into": attention_written_into,
    "a relative shift": relative_shift,
    "negatives": negatives,
    "a cache of keys": cache_of_keys,
    "first places of joined rows": lambda x, ids, mask, w: (
        x.flatten(0, 1).min(0).values, x.flatten(0, 1).max(0), x.reshape(-1, E)[torch.cdist(w.rows, x.flatten(0, 1)).argmin(1)],
    ),
    "from whole rows to tokens": lambda x, ids, mask, w: torch.cdist(w.rows, x).softmax(-1),
    "blocks that are chosen": blocks_that_are_chosen,
    "a relative shift of tokens first": shift_of_tokens_first,
    "features joined and cut": lambda x, ids, mask, w: (x.flatten(1)[:, 5:45].sin(), x.reshape(2, E, -1).cos(), x.reshape(2, -1, 4)[:, 3:9]),
    "distributions": distributions,
    "aligned with labels": aligned_with_labels,
    "running products and maxima": lambda x, ids, mask, w: (
        x.sigmoid().cumprod(1), x.cummax(1), x.cummin(1), x.logcumsumexp(dim=1), x.diff(dim=1), x.mT.diff(2, -1),
    ),
    "windows that overlap": lambda x, ids, mask, w: (
        x.unfold(1, 4, 2), x.unfold(2, 3, 1), x.mT.unfold(-1, 3, 3),
        F.unfold(x.mT.unsqueeze(-1), kernel_size=[3, 1], padding=[1, 0]),
        F.unfold(x.mT.unsqueeze(2), kernel_size=[1, 5], padding=[0, 2], stride=(1, 2)),
    ),
    "adaptive pools": lambda x, ids, mask, w: (F.adaptive_avg_pool1d(x.mT, 3), F.adaptive_max_pool1d(x.mT, 1)),
    "pieces": lambda x, ids, mask, w: (
        *x.chunk(3, 1), *x.split(5, dim=1), *torch.tensor_split(x, [3, 7], dim=1), *x.split([2, x.shape[1] - 2], 1),
    ),
    "rows of tokens taken apart": lambda x, ids, mask, w: (torch.stack(x.unbind(1)), torch.stack(list(x.mT.mT.movedim(1, 0)))),
    "gathered along dims": lambda x, ids, mask, w: (
        torch.take_along_dim(x, (mask.sum(1) - 1)[:, None, None], dim=1),
        torch.take_along_dim(x, (ids % E)[..., None], dim=2),
    ),
    "pairs of tokens and their transpose": lambda x, ids, mask, w: (
        _symmetric(x[:, :, None] * x.cos()[:, None]).sin(),
        torch.einsum("bxi,oij,byj->boxy", x, torch.stack([w.weight, w.weight.T]), x.sin()).tanh().sum(-1),
    ),
    "a shallow copy": lambda x, ids, mask, w: copy(x).sin(),
    "mixer": lambda x, ids, mask, w: F.linear(F.linear(x.mT, w.mixing[:5]).relu(), w.mixing[:, :5]).mT + x,
    "queries and values of other storages": lambda x, ids, mask, w: F.scaled_dot_product_attention(
        *[F.pad(x, (0, 0, 5, 0))[:, : x.shape[1]]] * 2, x, is_causal=True
    ),
}  # fmt: skip
