"""PyTorch's memory-efficient operator: what it is called with, on the meta device; its results, where plain torch stands in for it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sp.attention.kernels import self_check, torch_efficient
from lightning_sp.attention.kernels.select import select_kernel
from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.kernels.torch_efficient import TorchEfficientKernel
from lightning_sp.attention.spec.scores import Scores
from lightning_sp.config import AttentionOptions

CPU = torch.device("cpu")


class Backward(TorchDispatchMode):
    """Gives the backward's shapes: torch's own function for them does not take the operator's arguments."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._efficient_attention_backward.default:
            return *(torch.empty_like(each) for each in args[1:4]), None
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("dim", [64, 20])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_calls_fit_their_operators_schemas(dim, kv_heads):
    """Arguments, shapes and lse layout; no number is computed, no GPU has run it."""
    kernel = TorchEfficientKernel()
    q = torch.empty(2, 8, 100, dim, device="meta")
    k = torch.empty(2, kv_heads, 60, dim, device="meta")
    out, lse = kernel.forward(q, k, k, causal=False, scale=0.1)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    with Backward():
        gradients = kernel.backward(out, q, k, k, out, lse, causal=False, scale=0.1)
    assert [t.shape for t in gradients] == [q.shape, k.shape, k.shape]


def scores_of(q: Tensor, k: Tensor, mask: int, scale: float) -> Tensor:
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) if mask == 1 else torch.zeros(1, dtype=torch.bool)
    return scores.masked_fill(hidden, -math.inf)


def forward(q: Any, k: Any, v: Any, *others: Any, scale: float) -> tuple[Any, ...]:
    """As the operator: (B, S, H, D), heads alike, an lse that is padded to 32 rows."""
    assert q.shape[2] == k.shape[2] == v.shape[2]
    assert others[:3] == (None, None, None)
    length, keys, dropout, mask, with_lse = others[3:]
    assert (length, keys, dropout, with_lse) == (q.shape[1], k.shape[1], 0.0, True)
    scores = scores_of(q, k, mask, scale)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), v)
    padded = torch.full((*lse.shape[:2], -(-q.shape[1] // 32) * 32), math.nan)
    padded[..., : q.shape[1]] = lse
    return out, padded, None, None, length, keys


def backward(grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, *others: Any, scale: float) -> tuple[Any, ...]:
    """As the operator: from the lse that it is given, of which rows beyond the queries must weigh nothing."""
    _, _, length, keys, lse, dropout, _, _, mask, bias_learns = others
    assert (bias, length, keys, dropout, bias_learns) == (None, q.shape[1], k.shape[1], 0.0, False)
    assert lse.shape[-1] % 32 == 0
    assert bool((lse[..., length:] == math.inf).all())
    weights = (scores_of(q, k, mask, scale) - lse[..., :length, None]).exp()
    dv = torch.einsum("bhqk,bqhd->bkhd", weights, grad)
    products = torch.einsum("bqhd,bkhd->bhqk", grad, v)
    ds = weights * (products - (grad * out).sum(-1).transpose(1, 2)[..., None]) * scale
    return torch.einsum("bhqk,bkhd->bqhd", ds, k), torch.einsum("bhqk,bqhd->bkhd", ds, q), dv, None


@pytest.fixture
def stand_in(monkeypatch):
    """Plain torch in the operators' place."""
    operators = SimpleNamespace(_efficient_attention_forward=forward, _efficient_attention_backward=backward)
    monkeypatch.setattr(torch_efficient, "_aten", operators)
    self_check.answer.cache_clear()
    yield operators
    self_check.answer.cache_clear()


def test_its_results_are_those_of_plain_torch(stand_in):
    assert self_check.is_right(TorchEfficientKernel, CPU, torch.float32)
    worst = max(
        self_check._error(TorchEfficientKernel, CPU, torch.float64, (), 16, causal=each) for each in (True, False)
    )
    assert worst < 1e-6  # the operator's lse is float32


WRONG = {
    "scale": lambda *args, scale: forward(*args, scale=scale * 1.01),
    "mask": lambda *args, scale: forward(*args[:9], 0, *args[10:], scale=scale),
    "lse": lambda *args, scale: (lambda out, lse, *rest: (out, lse / math.log(2), *rest))(*forward(*args, scale=scale)),
    "raises": lambda *args, scale: (_ for _ in ()).throw(RuntimeError("no kernel image is available")),
    "nan": lambda *args, scale: (torch.full_like(args[0], math.nan), *forward(*args, scale=scale)[1:]),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_kernel_is_not_chosen_and_one_warning_says_so(stand_in, how, monkeypatch):
    stand_in._efficient_attention_forward = WRONG[how]
    chosen = lambda *_: (TorchEfficientKernel, TorchEfficientKernel)  # noqa: E731
    monkeypatch.setattr("lightning_sp.attention.kernels.select.kernel_for", chosen)
    with pytest.warns(
        UserWarning, match="torch memory-efficient \\(cuda\\) is not used on cpu in torch.float32"
    ) as said:
        kernels = [select_kernel(AttentionOptions(), CPU, torch.float32, 16, Scores()) for _ in range(3)]
    assert {type(each) for each in kernels} == {TiledKernel}
    assert len(said) == 1


def test_what_stands_behind_the_operators_is_asked_anew_and_named(stand_in, monkeypatch):
    assert self_check.is_right(TorchEfficientKernel, CPU, torch.float32)
    stand_in._efficient_attention_forward = WRONG["scale"]
    assert self_check.is_right(TorchEfficientKernel, CPU, torch.float32)  # known
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    with pytest.warns(
        UserWarning, match=r"\(cuda\) by FA4 is not used on cpu .*restore_flash_attention_impl\(\) takes"
    ):
        assert not self_check.is_right(TorchEfficientKernel, CPU, torch.float32)


@pytest.mark.parametrize("how", ["not added up", "another group", "own lse"])
def test_a_wrong_backward_is_not_chosen(stand_in, how):
    def wrong(grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, *others: Any, scale: float) -> tuple[Any, ...]:
        dq, dk, dv, _ = backward(grad, q, k, v, bias, out, *others, scale=scale)
        if how == "own lse":
            own = forward(q, k, v, None, None, None, q.shape[1], k.shape[1], 0.0, others[8], True, scale=scale)
            return backward(
                grad,
                q,
                k,
                v,
                bias,
                own[0],
                *others[:4],
                others[4].where(others[4] == math.inf, own[1]),
                *others[5:],
                scale=scale,
            )
        return (dq, dk * 0.5, dv, None) if how == "not added up" else (dq, dk.roll(1, 2), dv, None)

    stand_in._efficient_attention_backward = wrong
    with pytest.warns(UserWarning, match="its numbers are off by"):
        assert not self_check.is_right(TorchEfficientKernel, CPU, torch.float32)
