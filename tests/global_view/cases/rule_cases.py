"""What a user may write with a tensor of the sequence, as functions of one device: x (B, S, E), ids (B, S), mask (B, S), whole tensors."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.global_view.cases.composed_cases import COMPOSED_CASES
from tests.global_view.cases.function_cases import FUNCTION_CASES
from tests.global_view.cases.line_cases import LINE_CASES
from tests.global_view.cases.more_cases import MORE_CASES
from tests.global_view.cases.paper_cases import PAPER_CASES
from tests.global_view.cases.row_cases import ROW_CASES
from tests.global_view.cases.token_cases import TOKEN_CASES
from tests.global_view.cases.view_cases import VIEW_CASES
from tests.global_view.whole import Case, E, H, V, Whole


def heads(x: Tensor, w: Whole) -> tuple[Tensor, Tensor, Tensor]:
    b, s, _ = x.shape
    q, k, v = F.linear(x, w.qkv).split(E, dim=2)
    return tuple(each.view(b, s, H, E // H).transpose(1, 2) for each in (q, k, v))  # type: ignore[return-value]


def nano(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    q, k, v = heads(x, w)
    t = x.size(1)
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    seen = torch.tril(torch.ones(t, t)).view(1, 1, t, t)
    att = att.masked_fill(seen == 0, float("-inf"))
    y = F.dropout(F.softmax(att, dim=-1), 0.1, training=False) @ v
    return y.transpose(1, 2).contiguous().view(*x.shape)


def bloom(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    b, t, _ = x.shape
    q, k, v = (each.reshape(b * H, t, E // H) for each in heads(x, w))
    slopes = torch.tensor([2.0 ** -(i + 1) for i in range(H)], dtype=x.dtype)
    alibi = slopes[:, None] * ((mask.cumsum(-1) - 1) * mask)[:, None, :]
    alibi = alibi.reshape(b * H, 1, t)
    scores = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.5)
    scores = scores.view(b, H, t, t)
    hidden = torch.triu(torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype), 1)[None, None].expand(b, 1, t, t)
    weights = F.softmax(scores + hidden, dim=-1, dtype=torch.float64).to(x.dtype)
    out = torch.bmm(weights.view(b * H, t, t), v)
    return out.view(b, H, t, E // H).transpose(1, 2).reshape(b, t, E)


def t5(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    q, k, v = heads(x, w)
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += w.relative
    return torch.matmul(scores.softmax(-1), v).transpose(1, 2).flatten(2)


def einsum_attention(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    q, k, v = (each.transpose(1, 2) for each in heads(x, w))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2.0
    t = x.shape[1]
    seen = torch.ones(t, t, dtype=torch.bool).tril()
    scores = torch.where(seen, scores, torch.tensor(float("-inf"), dtype=x.dtype))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), v).reshape(*x.shape)


def grouped(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    q, k, v = heads(x, w)
    k, v = (each[:, :2].repeat_interleave(2, dim=1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def pooled(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    weights = (x @ w.bias).masked_fill(mask == 0, -torch.inf).softmax(-1)
    return (weights.unsqueeze(1) @ x).squeeze(1)


def label_shift(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    logits = F.linear(x, w.head)[..., :-1, :].contiguous()
    labels = ids[..., 1:].contiguous()
    logps = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (logps * mask[:, 1:]).sum(-1)


def rope(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    t = x.shape[1]
    angles = torch.outer(torch.arange(t, dtype=x.dtype), torch.arange(E // 2, dtype=x.dtype) + 1)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def complex_rope(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    t = x.shape[1]
    angles = torch.outer(torch.arange(t, dtype=x.dtype), torch.arange(E // 2, dtype=x.dtype) + 1)
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turn).flatten(2)


def all_hidden(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """A query whose keys are all hidden by one number weighs them alike."""
    q, k, v = heads(x, w)
    hidden = ~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    hidden[3] = True
    return ((q @ k.mT).masked_fill(hidden, -1e9).softmax(-1) @ v).transpose(1, 2).flatten(2)


def torchs_mask(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Added to the scores that are written out, and given to torch's own attention."""
    q, k, v = heads(x, w)
    later = torch.triu(torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype), 1)
    out = (q @ k.mT + later).softmax(-1) @ v + F.scaled_dot_product_attention(q, k, v, attn_mask=later)
    return out.transpose(1, 2).flatten(2)


def window_and_padding(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """A window of both sides; a causal one; a causal mask and padding in one."""
    q, k, v = heads(x, w)
    t = torch.arange(x.shape[1])
    distance = t[:, None] - t[None, :]
    near = torch.where(distance.abs() < 4, q @ k.mT, -torch.inf).softmax(-1) @ v
    behind = F.scaled_dot_product_attention(q, k, v, attn_mask=((distance >= 0) & (distance < 3))[None, None])
    seen = (distance >= 0) & mask[:, None, None, :].bool()
    shown = (
        F.scaled_dot_product_attention(q, k, v, attn_mask=seen) + (q @ k.mT).masked_fill(~seen, -1e9).softmax(-1) @ v
    )
    return (near + behind + shown).transpose(1, 2).flatten(2)


def softcap(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    q, k, v = heads(x, w)
    scores = torch.tanh(q @ k.mT * 0.7 / 3.0) * 3.0
    scores = scores.masked_fill(mask[:, None, None, :] == 0, -torch.inf) + w.relative
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def gpt1(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    q, k, v = heads(x, w)
    b = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=x.dtype))
    scores = (q @ k.mT / 2) * b + -1e4 * (1 - b)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)


def ids_written_through_a_view(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    ids = ids.clone()
    _ = ids.cumsum(1)
    flat = ids.view(-1)
    flat[3] = 7
    ids[:, 1:3] = ids[:, 2:4]
    ids[ids == 5] = 0
    return F.embedding(ids, w.table) * x + ids.cumsum(1)[..., None]


def normalized_differences(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    """Of padding they would be 0 / 0."""
    d = F.linear(x, w.weight)[:, 1:] - F.linear(x, w.weight)[:, :-1]
    return F.linear(d / d.norm(dim=-1, keepdim=True), w.weight)


def scores_used_twice(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    q, k, v = heads(x, w)
    scores = q @ k.mT
    other = scores.clone()
    other += w.relative
    return (scores.softmax(-1) @ v + other.softmax(-1) @ v).transpose(1, 2).flatten(2)


def written_rows(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Tensor:
    y = ids.clone()
    first = y.cumsum(1)
    y[0] = torch.arange(x.shape[1])
    return y + first


CASES: dict[str, Case] = {
    **MORE_CASES,
    **LINE_CASES,
    **TOKEN_CASES,
    **PAPER_CASES,
    **ROW_CASES,
    **VIEW_CASES,
    **COMPOSED_CASES,
    **FUNCTION_CASES,
    "logarithm of what padding would be": lambda x, ids, mask, w: F.linear(x[:, 1:].abs().log(), w.weight),
    "differences, normalized": normalized_differences,
    "scores used twice": scores_used_twice,
    "rows written": written_rows,
    "var by position": lambda x, ids, mask, w: (x.var(1, True), x.var(1, False, True), x.std(-1, False, True)),
    "keepdims": lambda x, ids, mask, w: x.sum(axis=1, keepdims=True),  # type: ignore[call-overload]
    "amin": lambda x, ids, mask, w: x.relu().amin(1),
    "topk of tokens": lambda x, ids, mask, w: x[..., 0].topk(8, dim=1).values,
    "topk of one feature": lambda x, ids, mask, w: x.topk(1, dim=-1).values,
    "first places": lambda x, ids, mask, w: torch.where(ids.flatten() > -1)[0],
    "cast as another": lambda x, ids, mask, w: x * w.positions.to(x) + w.bias.to(x),
    "detached leaf": lambda x, ids, mask, w: x * x.detach().requires_grad_(),
    "gradient by frequency": lambda x, ids, mask, w: F.embedding(ids, w.table, scale_grad_by_freq=True) * x,
    "arguments by name": lambda x, ids, mask, w: torch.sum(input=F.linear(input=x, weight=w.weight), dim=-1),
    "joined with nothing": lambda x, ids, mask, w: torch.cat([torch.zeros(2, 0, E, dtype=x.dtype), x], dim=1),
    "pointwise with whole tensors": lambda x, ids, mask, w: torch.tanh(x * w.bias + w.positions) * mask.unsqueeze(-1),
    "learned positions": lambda x, ids, mask, w: x + F.embedding(torch.arange(x.shape[1]) % V, w.table),
    "positions of shape (1, S)": lambda x, ids, mask, w: x + w.positions[torch.arange(x.size(1)).unsqueeze(0)],
    "embedding": lambda x, ids, mask, w: F.embedding(ids, w.table) * x,
    "bags of entries": lambda x, ids, mask, w: (
        F.embedding_bag(
            (ids.flatten()[:, None] + torch.arange(3)) % V,
            w.table,
            mode="sum",
            per_sample_weights=x.flatten(0, 1)[:, :3],
        ),
        F.embedding_bag((ids.flatten()[:, None] + torch.arange(3)) % V, w.table),
    ),
    "table by index": lambda x, ids, mask, w: w.table[ids] * x,
    "linear and norm": lambda x, ids, mask, w: F.layer_norm(F.linear(x, w.weight, w.bias), (E,)),
    "folded linear": lambda x, ids, mask, w: torch.addmm(w.bias, x.view(-1, E), w.weight).view(*x.shape),
    "rms norm by hand": lambda x, ids, mask, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "rope": rope,
    "complex rope": complex_rope,
    "views": lambda x, ids, mask, w: x.view(x.shape[0], x.shape[1], 2, -1).permute(2, 0, 1, 3).flatten(1, 2),
    "tokens and features joined": lambda x, ids, mask, w: x.flatten(1).view(x.shape[0], -1, E).tanh(),
    "movedim": lambda x, ids, mask, w: x.movedim(1, 0).movedim(-1, 0),
    "split and cat": lambda x, ids, mask, w: torch.cat([x[..., :3], x[..., 3:] * 2], dim=-1),
    "stack": lambda x, ids, mask, w: torch.stack([x, x.sin()], dim=1),
    "sum over the sequence": lambda x, ids, mask, w: x.sum(1),
    "mean of all": lambda x, ids, mask, w: x.mean(),
    "masked mean": lambda x, ids, mask, w: (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True),
    "max over the sequence": lambda x, ids, mask, w: x.max(dim=1)[0],
    "max of ties": lambda x, ids, mask, w: x.relu().amax(1),
    "min": lambda x, ids, mask, w: x.min(dim=1).values,
    "logsumexp": lambda x, ids, mask, w: x.logsumexp(1),
    "norm": lambda x, ids, mask, w: x.norm(dim=1),
    "norm of all": lambda x, ids, mask, w: torch.linalg.vector_norm(x),
    "var": lambda x, ids, mask, w: x.var(1),
    "std of all": lambda x, ids, mask, w: x.std(),
    "std of zeros": lambda x, ids, mask, w: (x * 0).std(1) + x.mean(1),
    "norms of zeros": lambda x, ids, mask, w: torch.linalg.vector_norm(x * 0, dim=1) + (x * 0).norm(2, 1) + x.mean(1),
    "softmax over the sequence": lambda x, ids, mask, w: x.softmax(1),
    "log_softmax over the sequence": lambda x, ids, mask, w: x.log_softmax(dim=1),
    "attention pooling": pooled,
    "argmax": lambda x, ids, mask, w: x.argmax(1),
    "first token": lambda x, ids, mask, w: x[:, 0] @ w.weight,
    "last token": lambda x, ids, mask, w: x[:, -1, :],
    "last by mask": lambda x, ids, mask, w: x[torch.arange(x.shape[0]), mask.sum(-1).long() - 1],
    "gathered tokens": lambda x, ids, mask, w: x.gather(1, torch.tensor([2, 5]).view(2, 1, 1).expand(2, 1, E)),
    "masked tokens": lambda x, ids, mask, w: x[mask.bool()],
    "without the first": lambda x, ids, mask, w: x[:, 1:] * 2,
    "without the last": lambda x, ids, mask, w: x[:, :-1].tanh(),
    "differences": lambda x, ids, mask, w: x[:, 1:] - x[:, :-1],
    "every second": lambda x, ids, mask, w: x[:, ::2].exp(),
    "shifted labels": label_shift,
    "tokens mixed by a whole matrix": lambda x, ids, mask, w: w.mixing @ x,
    "gram matrix": lambda x, ids, mask, w: x.transpose(1, 2) @ x,
    "attention by hand": nano,
    "a mask that is added": torchs_mask,
    "windows and padding": window_and_padding,
    "attention with alibi by baddbmm": bloom,
    "attention with a learned bias": t5,
    "attention to nothing": all_hidden,
    "attention as in GPT-1": gpt1,
    "attention with a softcap": softcap,
    "attention by einsum": einsum_attention,
    "grouped attention of torch": grouped,
    "cumsum of a number for each token": lambda x, ids, mask, w: x.mean(-1).cumsum(1),
    "flip of a number for each token": lambda x, ids, mask, w: x[..., 0].flip(1),
    "sorted numbers": lambda x, ids, mask, w: x[..., 0].sort(dim=1)[0],
    "normalize and cosine": lambda x, ids, mask, w: F.cosine_similarity(
        F.normalize(x, dim=-1), w.rows[:, None], dim=-1
    ),
    "each token beside the first by its angle": lambda x, ids, mask, w: F.cosine_similarity(x[:, :1], x.sin(), dim=-1),
    "smooth l1 of tokens": lambda x, ids, mask, w: F.smooth_l1_loss(x, w.positions.expand_as(x)),
    "kl of a teacher": lambda x, ids, mask, w: F.kl_div(
        F.linear(x, w.head).log_softmax(-1), F.linear(x.detach().cos(), w.head).softmax(-1), reduction="batchmean"
    ),
    "written in place": lambda x, ids, mask, w: x.mul(2).add_(1).clamp_(min=-1).masked_fill_(mask[..., None] == 0, 0.5),
    "ids written through a view": ids_written_through_a_view,
    "rows put into places": lambda x, ids, mask, w: x.masked_scatter((ids == 3).unsqueeze(-1).expand_as(x), w.images),
    "beside its first token": lambda x, ids, mask, w: x[:, :1] + x * x[:, -1:].sin(),
    "first token beside a table": lambda x, ids, mask, w: x[:, :1] * w.positions,
    "attention with a mask of two dims": lambda x, ids, mask, w: F.scaled_dot_product_attention(
        *heads(x, w), attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1)
    ),
    "flipped and written to a view": lambda x, ids, mask, w: [y := x.flip(1), y.view(-1).mul_(2), y][-1],
    "where with ids": lambda x, ids, mask, w: torch.where((ids > 4).unsqueeze(-1), x, w.bias),
    "one hot": lambda x, ids, mask, w: F.one_hot(ids, V).to(x.dtype) @ w.head,
    "topk of features": lambda x, ids, mask, w: x.topk(3, dim=-1).values,
    "z-loss": lambda x, ids, mask, w: F.linear(x, w.head).logsumexp(-1).square().mean(),
    "flip": lambda x, ids, mask, w: x.flip(1),
    "roll": lambda x, ids, mask, w: x.roll(2, dims=1) * x,
    "shifted right by padding": lambda x, ids, mask, w: F.pad(x[:, :-1], (0, 0, 1, 0)) + x,
    "padded by three": lambda x, ids, mask, w: F.pad(x, (0, 0, 2, 1), value=0.5).sin(),
    "a class token in front": lambda x, ids, mask, w: torch.cat([w.rows[:, None], x], dim=1).cos(),
    "a class token in attention": lambda x, ids, mask, w: grouped(torch.cat([w.rows[:, None], x], dim=1), ids, mask, w)[
        :, 0
    ],
    "two sequences joined": lambda x, ids, mask, w: torch.cat([x, x.flip(1)], dim=1).tanh()[:, 5:20],
    "causal convolution": lambda x, ids, mask, w: F.conv1d(
        F.pad(x.transpose(1, 2), (2, 0)), w.kernel, groups=E
    ).transpose(1, 2),
    "convolution": lambda x, ids, mask, w: F.conv1d(x.transpose(1, 2), w.full_kernel, w.bias, padding=2, dilation=2),
    "token shift": lambda x, ids, mask, w: x + w.bias * (F.pad(x, (0, 0, 1, -1)) - x),
    "windows of two": lambda x, ids, mask, w: (x[:, 1:] + x[:, :-1]) / 2,
    "glu over features": lambda x, ids, mask, w: F.glu(x, dim=-1),
}
