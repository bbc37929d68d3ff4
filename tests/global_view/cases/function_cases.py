"""`autograd.Function`s as users and libraries write them, with the sequence among what they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tests.flows.models.own.parallel_scan import scan_in_place
from tests.global_view.whole import Case, E, Whole


class Scan(torch.autograd.Function):
    """A parallel scan, padded to a power of two, whose backward is a scan of the reversed sequence."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor) -> Tensor:
        padding = (0, 0, 0, 16 - x.shape[1])
        h = F.pad(x, padding).clone()
        scan_in_place(F.pad(a, padding).clone(), h)
        h = h[:, : x.shape[1]]
        ctx.save_for_backward(a, h)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, h = ctx.saved_tensors
        later = F.pad(a[:, 1:], (0, 0, 0, 1))
        padding = (0, 0, 0, 16 - a.shape[1])
        g = F.pad(grads[0], padding).flip(1).clone()
        scan_in_place(F.pad(later, padding).flip(1).clone(), g)
        g = g.flip(1)[:, : a.shape[1]]
        before = torch.zeros_like(h)
        before[:, 1:].add_(h[:, :-1])
        return before * g, g


scan = Scan.apply


class Expectation(torch.autograd.Function):
    """Attention without a softmax, as YOSO has it: its gradient is not the one of its forward."""

    @staticmethod
    def forward(ctx: Any, mask: Tensor, q: Tensor, k: Tensor, v: Tensor, config: dict[str, int]) -> Tensor:
        weights = (1 - torch.acos(torch.matmul(q, k.transpose(-1, -2))) / torch.pi) ** config["bits"]
        weights = weights * mask[:, :, None] * mask[:, None, :]
        ctx.save_for_backward(weights, q, k, v)
        ctx.config = config
        return torch.matmul(weights, v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weights, q, k, v = ctx.saved_tensors
        half = ctx.config["bits"] / 2
        weighed = torch.matmul(grads[0], v.transpose(-1, -2)) * weights
        g_k = torch.matmul(weighed.transpose(-1, -2), half * q)
        return None, torch.matmul(weighed, half * k), g_k, torch.matmul(weights.transpose(-1, -2), grads[0]), None


class Softmax(torch.autograd.Function):
    """A softmax over keys that are seen, as DeBERTa's was, of the scores of an attention."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim).masked_fill(~mask, 0)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return torch._softmax_backward_data(grads[0], weights, ctx.dim, weights.dtype), None, None


class Swish(torch.autograd.Function):
    """By torch's own backwards, of tokens that are weighed by all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, weights = x.tanh(), x.log_softmax(1)
        ctx.save_for_backward(x, gate, weights)
        return gate * x + weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, gate, weights = ctx.saved_tensors
        by_gate = torch.ops.aten.tanh_backward(grads[0] * x, gate)
        return by_gate + grads[0] * gate + torch._log_softmax_backward_data(grads[0], weights, 1, x.dtype)


class Standardised(torch.autograd.Function):
    """Numbers of all tokens of a row, in the newer style: with a mean and a place beside, a weight and a default."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float = 1e-3) -> tuple[Tensor, Tensor, Tensor, int]:
        mean = x.mean(1)
        y = (x - mean[:, None]) / (x.square().sum(1, keepdim=True) / x.shape[1] + eps) * weight
        return y, mean, x.argmax(1), 7

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.eps = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(x, weight, output[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, y = ctx.saved_tensors
        assert grads[2].shape == (2, E)
        assert grads[3] is None
        of_x = grads[0] * weight - (grads[0] * y).mean(1, keepdim=True) + grads[1][:, None] / x.shape[1] * ctx.eps
        return of_x, (grads[0] * y).sum((0, 1)), None


class Picky(torch.autograd.Function):
    """Gradients that are not asked for or not given, of the shape of what is broadcast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, table: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.x = x
        return x.flip(1) * scale + bias, x + table

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert ctx.needs_input_grad == (True, True, True, False)
        every = grads[0] * ctx.x.cos()
        of_table = grads[0] * 2 if grads[1] is None else grads[1] * 3
        return every.flip(1), every, of_table, None


class Pooled(torch.autograd.Function):
    """A gradient that is whole, of what is of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.linspace(0, 1, ctx.shape[1], dtype=grads[0].dtype)[None, :, None] * grads[0][:, None]


class ByNumpy(torch.autograd.Function):
    """What numpy computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        order = np.argsort(x.detach().numpy().sum(-1), 1)
        ctx.order = torch.from_numpy(order)[..., None].expand(x.shape)
        return x.gather(1, ctx.order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.zeros_like(grads[0]).scatter(1, ctx.order, grads[0])


class Masked(torch.autograd.Function):
    """Rows of numbers beside rows of vectors."""

    @staticmethod
    def forward(ctx: Any, mask: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return x * mask[..., None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, grads[0] * ctx.saved_tensors[0][..., None]


def of_users(backward: Any, forward: Any = lambda x: x.view_as(x)) -> Any:
    """Return a user's function, called."""
    names = {"forward": staticmethod(lambda ctx, x: forward(x)), "backward": staticmethod(lambda ctx, g: backward(g))}
    return type("Users", (torch.autograd.Function,), names).apply


centred_gradient = of_users(lambda g: g - g.mean(1, keepdim=True))
over_how_many = of_users(lambda g: g / g.shape[1], lambda x: x / x.shape[1] + x.mean(1, keepdim=True))


def scanned(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    return scan(F.linear(x, w.weight).sigmoid(), x * 1).sin()


def expected(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    q, k = (0.9 * F.normalize(each, dim=-1) for each in (x, F.linear(x, w.weight)))
    return Expectation.apply(mask, q, k, x.sin(), {"bits": 4}).cos()


def softmax_of_scores(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & mask[:, None].bool()
    return Softmax.apply(x @ F.linear(x, w.weight).mT / 3, seen, -1) @ x


def standardised(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    y, mean, places, number = Standardised.apply(x.sin(), w.bias)
    again, *_ = Standardised.apply(y, w.bias, 0.5)
    return again * number, mean.cos(), places


def picky(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    return Picky.apply(x * 1, w.bias, w.positions, torch.tensor(0.3, dtype=x.dtype))[0].sin()


def recomputed(x: Tensor, ids: Tensor, mask: Tensor, w: Whole) -> Any:
    """With what stands in a list."""

    def block(x: Tensor, others: list[Tensor]) -> tuple[Tensor, Tensor]:
        scores = (x @ others[0].mT).masked_fill(
            ~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), -torch.inf
        )
        return F.linear(scores.softmax(-1) @ x, w.weight), x.mean(1)

    y, mean = checkpoint(block, x * 1, [x.sin()], use_reentrant=True)
    return y.cos(), mean.sin()


FUNCTION_CASES: dict[str, Case] = {
    "an own function: a scan": scanned,
    "an own function: an attention": expected,
    "an own function: a softmax of scores": softmax_of_scores,
    "an own function: backwards of torch": lambda x, ids, mask, w: Swish.apply(x * 1).sin(),
    "statistics by an own function": standardised,
    "an own function: some gradients": picky,
    "sum by an own function": lambda x, ids, mask, w: Pooled.apply(x * 2).sin(),
    "gathered by an own function of numpy": lambda x, ids, mask, w: ByNumpy.apply(x * 1).sin(),
    "an own function: rows and vectors": lambda x, ids, mask, w: Masked.apply(mask, x * 1).sin(),
    "an own function: a gradient without its mean": lambda x, ids, mask, w: centred_gradient(x * 1).sin(),
    "an own function: over how many there are": lambda x, ids, mask, w: over_how_many(x * 1).sin(),
    "recomputed by a reentrant checkpoint": recomputed,
}
