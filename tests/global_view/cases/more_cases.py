"""More of what a user may write with a tensor of the sequence: writing into it, blocks of it, chosen tokens, experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.global_view.whole import Case, E, H, Whole


def written_slices(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Features of one place are written into the next; single tokens, whole tensors and every second one."""
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    y[:, 0] = w.rows
    y[:, 3:5] = w.positions[3:5].sin()
    y[:, ::4, :2] = x[:, ::4, 2:4] * 3
    y[:, -1, 1] = 5.0
    y[..., 4:6] = w.positions[:, :2]
    y[0, 2:6] = x[1, 1:5]
    return y.tanh()


def written_by_masks(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    y = x * 2
    y[ids == 3] = w.bias
    y[mask == 0] = 0.5
    y[ids == 2] = w.images[: int((ids == 2).sum())]
    y[torch.arange(x.shape[1]).expand(2, -1) == 4] = w.bias.cos()
    return y.sin()


def made_empty(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """As multi-head latent attention joins its keys."""
    first, second = x[:, None].split([3, 5], dim=-1)
    y = x.new_empty(2, H, x.shape[1], E)
    y[..., :3].copy_(first.expand(-1, H, -1, -1))
    y[..., 3:].copy_(second.expand(-1, H, -1, -1).cos())
    return y


def blocked_attention(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Each block of four attends to itself and to the one before, as LongT5 does."""
    b, s, _ = x.shape
    n = 4
    padded = F.pad(x, (0, 0, 0, -s % n))
    q, k, v = (F.linear(padded, part).view(b, -1, n, H, E // H) for part in w.qkv.split(E))
    k, v = (torch.cat([F.pad(each, (0, 0, 0, 0, 0, 0, 1, -1)), each], dim=2) for each in (k, v))
    scores = torch.einsum("...qhd,...khd->...hqk", q, k)
    near = torch.ones(n, 2 * n, dtype=torch.bool).tril(n)
    weights = scores.masked_fill(~near, -torch.inf).softmax(-1)
    out = torch.einsum("...hqk,...khd->...qhd", weights, v)
    return out.reshape(b, -1, E)[:, :s] + x


def overlapping_chunks(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """Windows of tokens that overlap, by strides: of blocks by half of one, as Longformer's keys, and of tokens, as its values."""
    b, s, e = x.shape
    n = 4
    padded = F.pad(F.linear(x, w.weight), (0, 0, 0, -s % n))
    blocks = padded.view(b, -1, n, e)
    size, stride = list(blocks.size()), list(blocks.stride())
    size[1], stride[1] = 2 * size[1] - 1, stride[1] // 2
    keys = blocks.as_strided(size=size, stride=stride)
    values = F.pad(padded, (0, 0, 1, 2), value=-1)
    row, token, one = values.stride()
    values = values.as_strided((b, size[1] - 1, 6, e), (row, 2 * token, token, one))
    return torch.einsum("bcxe,bcye->bcxy", keys[:, 1:], values.sin()), keys.tanh()


def chunked_scan(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """A linear recurrence by chunks: within one by a product, from one to the next by a state."""
    b, s, _ = x.shape
    n = 4
    padded = F.pad(x, (0, 0, 0, -s % n))
    q, k, v = (F.linear(padded, part).reshape(b, -1, n, E) for part in w.qkv.split(E))
    gates = F.linear(padded, w.bias[None]).sigmoid().reshape(b, -1, n).cumsum(-1)
    lower = torch.ones(n, n, dtype=torch.bool).tril()
    decay = (gates[..., :, None] - gates[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    within = (q @ k.transpose(-1, -2)) * decay @ v
    states = k.transpose(-1, -2) @ v
    state = torch.zeros(b, E, E, dtype=x.dtype)
    before = []
    for i in range(states.shape[1]):
        before.append(state)
        state = state * 0.5 + states[:, i]
    out = within + q @ torch.stack(before, dim=1)
    return out.view(b, -1, E)[:, :s]


def compressed_keys(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Tokens attend to the means of windows of three tokens."""
    usable = x.shape[1] // 3 * 3
    windows = x[:, :usable].unflatten(1, (-1, 3))
    keys = (windows * windows.softmax(2)).sum(2)
    seen = torch.arange(keys.shape[1])[None] * 3 <= torch.arange(x.shape[1])[:, None]
    return ((x @ keys.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ F.linear(keys, w.weight)) + x


def experts(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Each token goes to two of three experts, as in Mixtral."""
    flat = x.view(-1, E)
    weights, chosen = F.linear(flat, w.weight[:3]).softmax(-1).topk(2, dim=-1)
    out = torch.zeros_like(flat)
    taken = F.one_hot(chosen, 3).permute(2, 1, 0)
    for expert in range(3):
        place, token = torch.where(taken[expert])
        state = F.linear(flat[token], w.weight * (expert + 1)).tanh() * weights[token, place, None]
        out.index_add_(0, token, state)
    return out.view_as(x)


def experts_in_place(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    flat = x.flatten(0, 1)
    out = flat * 0.5
    token = torch.nonzero(ids.flatten() < 4).squeeze(1)
    out[token] += F.linear(flat[token], w.weight)
    out[token[:3]] = 1.0
    return out.index_add(0, token, flat[token].cos())


def labels_that_count(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    counts = (mask == 1).flatten()
    logps = F.linear(x, w.head).view(-1, len(w.head))[counts].log_softmax(-1)
    labels = ids.flatten()[counts]
    return -logps.gather(-1, labels[:, None]).mean()


def sinks(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """As gpt-oss and MiMo write them, with the softmax made stable by hand."""
    b, s, _ = x.shape
    q, k, v = (F.linear(x, part).view(b, s, H, E // H).transpose(1, 2) for part in w.qkv.split(E))
    scores = q @ k.mT * 0.5 + torch.full((s, s), -1e30, dtype=x.dtype).triu(1)
    sink = w.bias[:H].reshape(1, -1, 1, 1).expand(b, -1, s, -1)
    scores = torch.cat([scores, sink], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
    return (F.dropout(weights, 0.1, training=False).to(v.dtype) @ v).transpose(1, 2).reshape(b, s, E)


def sinks_of_rows_that_see_nothing(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Scores that are made, for a query without a key; and sinks that are put beside scores minus their maximum."""
    b, s, _ = x.shape
    scores = x[:, None] @ x[:, None].mT
    hidden = torch.full((s, s), -1e30, dtype=x.dtype).triu(1)
    hidden[2] = -1e30
    sink = w.bias[:1].reshape(1, 1, 1, 1).expand(b, -1, s, -1)
    both = torch.cat([scores + hidden, sink], dim=-1)
    first = (both - both.max(dim=-1, keepdim=True).values).softmax(-1)[..., :-1] @ x[:, None]
    shifted = scores - scores.amax(-1, keepdim=True)
    second = torch.cat([shifted, sink], dim=-1).softmax(-1)[..., :-1] @ x[:, None]
    return (first + second).squeeze(1)


def stable(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    scores = (x @ x.mT).masked_fill(~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), -torch.inf)
    return (scores - torch.amax(scores, dim=-1, keepdim=True).detach()).softmax(-1) @ x


def scores_made(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """What the operator does not carry: products with masks, squares, masks that weigh all keys, weights that are used."""
    t, lower = x.shape[1], torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
    scores = x @ x.mT
    weights = scores.masked_fill(lower == 0, -torch.inf).softmax(-1)
    return (
        (scores * lower).softmax(-1) @ x,
        weights * lower.cos() @ x,
        (scores.masked_fill(lower == 0, -1e4) * 1e-4).softmax(-1) @ x,
        (lower - scores).softmax(-1) @ x,
        (scores + torch.full((t, t), -1e3, dtype=x.dtype) * 1e3).softmax(-1) @ x,
        (scores.square() + 1) @ x,
        (weights.clamp(min=1e-9).log() * weights).sum(-1),
        (scores * lower * 0.1 + w.relative[0, 0]) @ F.linear(x, w.weight),
        weights.topk(2, dim=-1).values,
    )


def indexer(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Each query attends to the four keys that an indexer chooses, as DeepSeek's sparse attention does."""
    b, s, _ = x.shape
    q = F.linear(x, w.weight).view(b, s, 2, 4)
    found = torch.matmul(q, x[..., :4].transpose(-1, -2).unsqueeze(1)).relu().sum(2)
    lower = torch.ones(s, s, dtype=torch.bool).tril()
    found = found.masked_fill(~lower, -torch.inf).topk(4, dim=-1).indices
    chosen = torch.full((b, s, s), -torch.inf, dtype=x.dtype).scatter(-1, found, 0.0)
    seen = chosen[:, None].masked_fill(~lower, -torch.inf)
    y = x.view(b, s, H, -1).transpose(1, 2)
    return F.scaled_dot_product_attention(y, y.sin(), y, attn_mask=seen).transpose(1, 2).flatten(2)


MORE_CASES: dict[str, Case] = {
    "attention in blocks": blocked_attention,
    "chunks that overlap": overlapping_chunks,
    "scan by chunks": chunked_scan,
    "attention to windows": compressed_keys,
    "experts": experts,
    "experts in place": experts_in_place,
    "masked labels": labels_that_count,
    "sinks": sinks,
    "sinks of rows that see nothing": sinks_of_rows_that_see_nothing,
    "scores minus their maximum": stable,
    "scores that are made": scores_made,
    "keys that an indexer chooses": indexer,
    "a triangular system in each block": lambda x, ids, mask, w: torch.linalg.solve_triangular(
        (x[:, :12].reshape(2, -1, 4, E) @ x[:, :12].reshape(2, -1, 4, E).mT).tril(-1) + torch.eye(4, dtype=x.dtype),
        F.linear(x[:, :12], w.weight).unflatten(1, (-1, 4)),
        upper=False,
    ).flatten(1, 2),
    "running sum": lambda x, ids, mask, w: x.cumsum(1) / (torch.arange(x.shape[1]) + 1)[:, None],
    "slices written": written_slices,
    "written by masks": written_by_masks,
    "new tensor, written": made_empty,
    "rows put by a mask of one feature": lambda x, ids, mask, w: x.masked_scatter((ids == 3).unsqueeze(-1), w.images),
    "rows put into joined rows": lambda x, ids, mask, w: x.flatten(0, 1).masked_scatter(
        (ids == 3).flatten().unsqueeze(-1).expand(-1, E), w.images
    ),
}
