"""Functions of torch that others make up, whole matrices, windows that are undone, mapped functions, and gradients within a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.global_view.whole import Case, E, Whole


def drawn_by_a_generator(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """Each token has numbers of its own, which one device draws from the user's generator."""
    drawn = torch.Generator().manual_seed(9)
    kept, noise = torch.empty_like(x).bernoulli_(0.5, generator=drawn), torch.zeros_like(x).normal_(generator=drawn)
    return x * kept, x + noise, torch.normal(x.detach(), 0.5, generator=drawn) * x


def classes_drawn(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """Each token has classes of its own, of its own probabilities, and rows have tokens that are drawn."""
    drawn = torch.Generator().manual_seed(9)
    one = x.detach().softmax(-1).flatten(0, 1).multinomial(1, generator=drawn).view(x.shape[:2])
    several = torch.multinomial(x[0].detach().exp(), num_samples=3, generator=drawn)
    tokens = torch.multinomial(x[..., 0].detach().exp(), 4, generator=drawn)
    return x.gather(-1, one[..., None]), x[0].gather(-1, several), x[torch.arange(2)[:, None], tokens]


def integrals(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    at = torch.arange(x.shape[1], dtype=x.dtype) ** 2
    return (
        torch.cumulative_trapezoid(x, dim=1), torch.cumulative_trapezoid(x.mT, at), torch.trapz(x, dx=0.5, dim=1),
        torch.trapezoid(x, at[None, :, None].expand_as(x), dim=1), torch.trapezoid(x.mT, at), torch.trapezoid(x, dim=-1),
    )  # fmt: skip


def joined_and_cut(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    return (
        torch.hstack([x, x]), torch.vstack([x, x]), torch.dstack([x, x]), torch.column_stack([x[0], x[0]]), *torch.hsplit(x[:, :12], 3),
        *torch.vsplit(x, 2), *torch.dsplit(x, 2), torch.atleast_3d(x[0]), torch.rot90(x, 1, (1, 2)), torch.rot90(x, 3, (0, 1)),
        torch.rot90(x, 2, (1, 2)), torch.fliplr(x), torch.flipud(x), x.ravel().sin(), torch.fft.fftshift(x, dim=1),
        torch.fft.ifftshift(x), torch.msort(x.transpose(0, 1)), torch.constant_pad_nd(x, (0, 0, 1, 0), 0.5), torch.take(x, torch.tensor([1, 5])),
    )  # fmt: skip


def put_in_copies(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    pairs = x @ x.mT
    square = (pairs.detach() * 1)[0]
    return (
        torch.select_scatter(x, w.rows, 1, 3), torch.slice_scatter(x, w.rows[:, None].expand(-1, 2, -1), 1, 3, 5),
        torch.diagonal_scatter(pairs.relu(), torch.zeros_like(x[..., 0]), 0, 1, 2), square.relu().fill_diagonal_(2.0) * 1,
    )  # fmt: skip


def products(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    pairs = torch.einsum("bid,bjd->bij", x, x.sin())
    return (
        torch.linalg.vecdot(x, x.sin()), torch.linalg.vecdot(x, x.sin(), dim=1), torch.inner(x, w.weight), torch.mv(x[0], w.bias),
        torch.addmv(x[0, :, 0], x[0], w.bias, alpha=2), torch.addbmm(w.weight, x.mT, x), torch.trace(x[0] @ x[0].T),
        torch.linalg.multi_dot([x[0], w.weight, w.weight]), torch.addmm(x[0], x[1], w.weight, beta=0.5), torch.einsum("bsd,ed", x, w.weight),
        torch.einsum("bii->b", pairs), torch.einsum("bsd,be->be", x, w.rows), torch.einsum("bsii->bs", x[..., :4].unflatten(2, (2, 2))),
    )  # fmt: skip


def norms_and_scales(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    return (
        torch.renorm(x, 2, 2, 1.0), torch.linalg.matrix_norm(x), torch.linalg.matrix_norm(x, 1), torch.linalg.matrix_norm(x, -float("inf")),
        torch.linalg.vector_norm(x, 0, 1), F.channel_shuffle(x.mT.unsqueeze(-1), 2), F.dropout1d(x.mT, 0.0), F.local_response_norm(x.mT, 3),
        x * torch.equal(x, x.clone()) * torch.allclose(x, x.clone()), torch.complex(x, x.sin()).abs(), torch.polygamma(1, x.abs() + 1),
        torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7),
        torch.fake_quantize_per_channel_affine(x, torch.full((E,), 0.1), torch.zeros(E, dtype=torch.int32), 2, -8, 7),
    )  # fmt: skip


def places_in_orders(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    q = torch.tensor([0.1, 0.9], dtype=x.dtype)
    return (
        x.median(-1), x.median(0), x.quantile(0.5, 0), torch.quantile(x, q, dim=-1), x.kthvalue(2), x.mode(0),
        torch.searchsorted(torch.linspace(-1, 1, 5, dtype=x.dtype), x.detach()),
    )  # fmt: skip


def whole_matrices(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    system = x @ x.mT + 20 * torch.eye(x.shape[1], dtype=x.dtype)
    q, r = torch.linalg.qr(x)
    return (
        torch.linalg.solve(system, x), torch.linalg.solve(system, x[..., 0]), torch.linalg.inv(system) @ x, torch.linalg.cholesky(system),
        torch.logdet(system), q @ r, torch.linalg.svdvals(x.mT), torch.linalg.pinv(x.mT), torch.linalg.lstsq(x, x.sin()).solution,
        torch.linalg.matrix_power(system * 0.01, 2), torch.linalg.solve(w.weight, x.unsqueeze(-1)).squeeze(-1),
        torch.linalg.det(x[..., :4].unflatten(2, (2, 2))), torch.linalg.matrix_exp(x.unflatten(2, (2, 4))[..., :2] * 0.1),
        torch.linalg.solve(system[0], x[0]),
    )  # fmt: skip


def resampled(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    y, length = x.mT, x.shape[1]
    grid = torch.stack(
        [torch.linspace(-1, 1, 9, dtype=x.dtype).expand(2, 1, 9), torch.zeros(2, 1, 9, dtype=x.dtype)], -1
    )
    own = torch.stack([x[..., 0].tanh(), torch.zeros_like(x[..., 0])], -1).unsqueeze(1)
    kernel = w.weight[:4].view(1, 4, 2, 4)[..., :3]
    return (
        F.fold(F.unfold(y.unsqueeze(-1), (3, 1), padding=(1, 0)), (length, 1), (3, 1), padding=(1, 0)),
        F.fold(x[:, :12].reshape(2, 3, 4 * E).mT, (12, E), (4, E), stride=(4, E)),
        F.max_unpool1d(*F.max_pool1d(y, 2, return_indices=True), 2), F.grid_sample(y.unsqueeze(2), own, align_corners=False),
        F.grid_sample(w.weight[None, None].expand(2, 1, E, E), x[..., :2].tanh().unsqueeze(1), align_corners=False),
        F.conv_transpose2d(x[:, None], kernel, stride=(2, 1), padding=1, output_padding=(1, 0)),
        F.conv1d(y, w.full_kernel[..., :2], padding="same"), F.grid_sample(y.unsqueeze(2), grid, align_corners=True),
    )  # fmt: skip


def losses(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    flat, weight, classes = x.flatten(0, 1), x.square(), F.linear(x, w.head).flatten(0, 1)
    return (
        F.cosine_embedding_loss(flat, flat.sin(), (mask * 2 - 1).flatten(), reduction="none"),
        F.cosine_embedding_loss(flat, flat.sin(), torch.ones(len(flat)), margin=0.2), F.mse_loss(x, x.sin(), weight=weight),
        F.mse_loss(x, x.sin(), weight=w.positions.square().expand_as(x)), F.mse_loss(x, x.sin(), weight=weight, reduction="sum"),
        F.l1_loss(x, x.sin(), weight=weight), F.huber_loss(x, x.sin(), weight=weight), F.multi_margin_loss(classes, ids.flatten(), p=2),
    )  # fmt: skip


def of_several_labels(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    labels = F.pad(ids.flatten()[:, None], (0, 10), value=-1)
    return F.multilabel_margin_loss(F.linear(x, w.head).flatten(0, 1), labels, reduction="sum")


def counts(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    return (
        x.detach().histc(5), x.detach().histc(5, -2, 2), tuple(torch.histogram(x.detach(), 5)),
        tuple(torch.histogram(x.detach(), torch.linspace(-2, 2, 6, dtype=x.dtype), density=True)),
        torch.bincount((ids[..., None] * 8 + torch.arange(8)).flatten()), torch.bincount(ids.flatten(), x.detach().sum(-1).flatten(), 50),
    )  # fmt: skip


def mapped(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    return (
        torch.vmap(lambda a, b: a[0] * b, in_dims=(1, 0), out_dims=1)(x, w.positions), torch.vmap(lambda row: F.linear(row, w.weight))(x),
        torch.vmap(torch.vmap(lambda token: w.weight @ token))(x), torch.vmap(lambda row: (row.mean(0), row.cumsum(0)))(x),
        torch.vmap(lambda a: a.softmax(-1), in_dims=2, out_dims=2)(x.view(2, -1, 2, 4)),
        torch.vmap(lambda row, weight: row @ weight, in_dims=(0, None))(x, w.weight),
        torch.vmap(lambda row, more: row * more["a"] + more["b"][0])(x, {"a": x.mean(1, keepdim=True), "b": [x.cos()]}),
    )  # fmt: skip


def padding_left_out(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """What an encoder in an evaluation gives of rows of several lengths: 0 behind each, before its last norm."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(E, 2, 16, 0.0, batch_first=True, dtype=x.dtype)
        module = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(E, dtype=x.dtype)).eval()
        module.norm.bias.fill_(0.5)  # type: ignore[union-attr,operator]
        plain = nn.TransformerEncoder(layer, 2).eval()
        return module(x.detach(), src_key_padding_mask=mask == 0), plain(x.detach(), src_key_padding_mask=mask == 0)


COMPOSED_CASES: dict[str, Case] = {
    "numbers drawn by a generator": drawn_by_a_generator,
    "classes drawn by a generator": classes_drawn,
    "integrals": integrals,
    "joined and cut by name": joined_and_cut,
    "put in copies": put_in_copies,
    "products of other names": products,
    "norms of other kinds": norms_and_scales,
    "places in orders": places_in_orders,
    "whole matrices": whole_matrices,
    "folded, unpooled and sampled": resampled,
    "losses of other kinds": losses,
    "sum of losses of several labels": of_several_labels,
    "histograms": counts,
    "mapped functions": mapped,
    "padding left out": padding_left_out,
}
