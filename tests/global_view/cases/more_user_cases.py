"""More of what users write by hand along a sequence: rows without padding, writes, losses, pieces, orders."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.global_view.cases.user_cases import USER_CASES, case
from tests.global_view.whole import E, V

MORE_USER_CASES = USER_CASES  # with those that follow


@case
def length_regulator(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    outs = [torch.repeat_interleave(x[b], ids[b] % 3, dim=0) for b in range(x.shape[0])]
    return nn.utils.rnn.pad_sequence(outs, batch_first=True)


@case
def unpad_rows(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    rows = [x[b, : int(n)] for b, n in enumerate(mask.sum(1))]
    return [r.mean(0) for r in rows], torch.cat(rows).std(0), nn.utils.rnn.pad_sequence(rows, batch_first=True)


@case
def flatten_unpad(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    idx = mask.flatten().nonzero().flatten()
    f = x.reshape(-1, E)[idx]
    f = f @ f.new_ones(E, E)
    out = x.new_zeros(x.shape[0] * x.shape[1], E)
    out[idx] = f
    return out.view_as(x), f.mean()


@case
def index_put_(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    out = torch.zeros(2, V, E, dtype=x.dtype)
    out = out.index_put((torch.arange(2)[:, None].expand_as(ids), ids), x, accumulate=True)
    return out


@case
def masked_select(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return (
        torch.masked_select(x, mask[..., None].bool()).mean(),
        x.masked_select(x > 0).sum(),
        x[x > 0].square().sum(),
        x[mask.bool()].mean(0),
    )


@case
def put_where(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    y = torch.where(mask[..., None].bool(), x, x.mean(1, keepdim=True))
    z = torch.full_like(x, 2.0)
    z[mask.bool()] = x[mask.bool()] * 3
    return y, z


@case
def std_norm_rows(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    mu = (x * mask[..., None]).sum((1, 2), keepdim=True) / (mask.sum(1) * E)[:, None, None]
    return (
        (x - mu) / (x - mu).pow(2).mean((1, 2), keepdim=True).sqrt(),
        F.layer_norm(x, x.shape[1:]),
        F.group_norm(x.mT, 2),
        F.instance_norm(x.mT),
        F.rms_norm(x, (E,)),
    )


@case
def losses(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    t = x.detach().roll(1, 1)
    return (
        F.mse_loss(x, t),
        F.l1_loss(x, t, reduction="sum"),
        F.gaussian_nll_loss(x, t, x.exp()),
        F.triplet_margin_loss(x, t, x.cos(), swap=True),
        F.margin_ranking_loss(x, t, torch.ones_like(t), margin=0.3, reduction="sum"),
        F.hinge_embedding_loss(x, (t > 0) * 2.0 - 1),
        F.kl_div(x.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
        F.multilabel_soft_margin_loss(x.flatten(0, 1), (t > 0).flatten(0, 1).double()),
        F.binary_cross_entropy_with_logits(x, (t > 0).double(), pos_weight=torch.ones(E, dtype=x.dtype) * 2),
    )


@case
def infonce(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    z = F.normalize(x.mean(1), dim=-1)
    s = z @ z.T / 0.1
    t = F.normalize(x, dim=-1)
    sim = torch.einsum("bsd,btd->bst", t, t)
    return (
        F.cross_entropy(s, torch.arange(2)),
        sim.logsumexp(-1).mean(),
        (sim.diagonal(dim1=1, dim2=2) - sim.logsumexp(-1)).mean(),
    )


@case
def tril_idx(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    S = x.shape[1]
    a, b = torch.tril_indices(S, S, -1)
    return (x[:, a] * x[:, b]).sum(-1)


@case
def searchsorted(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    c = x[..., 0].softmax(1).cumsum(1)
    u = torch.tensor([[0.2, 0.5, 0.8]] * 2, dtype=x.dtype)
    k = torch.searchsorted(c.contiguous(), u)
    return k, x.gather(1, k[..., None].expand(-1, -1, E))


@case
def isin(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    k = torch.isin(ids, torch.tensor([2, 3]))
    return x * k[..., None], ids.eq(3).int().argmax(-1), torch.eq(ids, 3).nonzero(), (ids == 3).float().cumsum(-1)


@case
def roll_neg_writes(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    y = x.new_zeros(x.shape)
    y[:, :-1] = x[:, 1:]
    y[:, -1:] = x[:, :1]
    z = ids.new_zeros(ids.shape)
    z[:, 1:] = ids[:, :-1].clone()
    z[:, 0] = 1
    z.masked_fill_(z == 5, 0)
    return y * z[..., None]


@case
def split_list(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    a, b = torch.split(x, [3, x.shape[1] - 3], 1)
    c, d = torch.tensor_split(x, 2, dim=1)
    return (
        torch.cat([b, a], 1),
        c.mean(1) - d.mean(1),
        torch.cat((x[:, ::2], x[:, 1::2]), 1),
    )


@case
def interleave(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    a, b = x[:, :6], x[:, 6:12]
    return torch.stack([a, b], 2).flatten(1, 2), torch.stack([a, b], dim=2).view(2, 12, E).cumsum(1)


@case
def func_grad(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return (
        torch.einsum("bsd,de,bse->bs", x, torch.eye(E, dtype=x.dtype), x),
        torch.linalg.norm(x, dim=-1),
        torch.linalg.vector_norm(x, dim=1),
        torch.dist(x, x * 0),
        x.flatten().dot(x.flatten()),
    )


@case
def misc(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return (
        torch.nan_to_num(x.log(), 0.0),
        x.float().double(),
        torch.clamp(x, x.mean(), x.max()),
        x.softmax(0),
        torch.addcmul(x, x, x),
        torch.lerp(x, x.mean(1, keepdim=True), 0.3),
        x.unsqueeze(0).expand(3, -1, -1, -1).mean(0),
        x.movedim(1, -1).contiguous().view(2, -1),
        x.logcumsumexp(1),
    )


@case
def pads(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return (
        F.pad(x.mT, (2, 3), mode="reflect"),
        F.pad(x.mT, (1, 1), mode="replicate"),
        F.pad(x, (1, 1, 2, 0)),
        F.pad(ids, (0, 2), value=-100),
        nn.functional.pad(x, (0, 0, -1, -2)),
    )


@case
def kthvalues(x: Tensor, ids: Tensor, mask: Tensor) -> Any:
    return (
        x.topk(4, 1).indices,
        x.sort(1).indices,
        x.kthvalue(3, 1),
        torch.argsort(x, 1, descending=True),
        x.mode(1).values,
    )
