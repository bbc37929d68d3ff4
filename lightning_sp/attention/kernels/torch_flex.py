"""PyTorch's FlexAttention, compiled: scores that a bias, a cap, a mask or a function of positions changes, in fused kernels on CUDA.

    forward     out_b, lse_b of this block, by one fused kernel with the change of the scores in it
    backward    with p = exp(s - lse) of the whole softmax and w = exp(lse_b - lse), p = w p_b. So the block's own backward, for the gradients
                    w dO  of out_b      and      w (sum(dO out_b) - sum(dO out))  of lse_b,
                gives p (dO v^T - sum(dO out)): the gradient by the whole softmax.

The block's forward runs once more in the backward, for its own out and lse. Dropout, and the gradients of what is learned (a bias, a
function's tensors), are the tiled kernel's. Source: FlexAttention, arXiv:2412.05496. Run on one kind of GPU: `select` takes it where
`self_check` finds its numbers right.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.spec.accumulator import accumulator_dtype
from lightning_sp.attention.spec.block_mask import BlockTable
from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.attention.spec.score_mod import MaskMod
from lightning_sp.attention.spec.scores import Scores

# Compilations, of all masks and changes of a process.
_FORMS = 64

_ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class TorchFlexKernel:
    """FlexAttention on one block.

    Args:
        scores: what changes the scores; without dropout, and nothing of it learned in the backward.
    """

    name = "torch flex (cuda)"

    def __init__(self, scores: Scores | None = None) -> None:
        self.scores = Scores() if scores is None else scores
        self.tiled = TiledKernel(self.scores)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, positions: ScorePositions | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one block; 0 and -inf for a query that sees none of it."""
        if self._form not in _failed:
            try:
                return _attend(q, k, v, _changed(self.scores, positions, causal, q.dtype), scale)
            except _FAILURES as error:
                self._leave_to_tiled(error)
        return self.tiled.forward(q, k, v, causal=causal, scale=scale, positions=positions)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
        positions: ScorePositions | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of one block from the global out and lse."""
        if self._form not in _failed:
            try:
                return self._backward(grad, q, k, v, out, lse, _changed(self.scores, positions, causal, q.dtype), scale)
            except _FAILURES as error:
                self._leave_to_tiled(error)
        return self.tiled.backward(grad, q, k, v, out, lse, causal=causal, scale=scale, positions=positions)

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, change: _ScoreFunction, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        with _gradients_allowed():
            given = [each.detach().requires_grad_() for each in (q, k, v)]
            own, own_lse = _attend(given[0], given[1], given[2], change, scale)
            with torch.no_grad():
                # A query that sees nothing of the block has no share in it, and one that sees nothing anywhere none at all.
                share = torch.exp(own_lse - lse).masked_fill(own_lse == -math.inf, 0.0)
                wide = grad.to(share.dtype)
                of_lse = share * (wide * (own.to(share.dtype) - out.to(share.dtype))).sum(-1)
                of_out = (share[..., None] * wide).to(own.dtype)
            dq, dk, dv = torch.autograd.grad((own, own_lse), given, (of_out, of_lse))
        return dq, dk, dv

    @property
    def _form(self) -> tuple[Any, ...]:
        """What is compiled: the kinds of changes, and the code of the user's functions."""
        functions = (each.function for each in (self.scores.score_mod, self.scores.mask_mod) if each is not None)
        return *self.scores.names(), *(getattr(each, "__code__", type(each)) for each in functions)

    def _leave_to_tiled(self, error: Exception) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        _failed.add(self._form)
        why = str(error).partition(chr(10))[0]
        _warn_once(
            f"{self.name} fails with {', '.join(self.scores.names())}: {why}; {self.tiled.name} computes it, several times slower"
        )


# What the compiler makes of a function that it cannot compile, and an operator of sizes that it does not take.
_FAILURES = (RuntimeError, NotImplementedError, TypeError, ValueError)
# The forms that failed: to try one again in each layer would cost a compilation each time.
_failed: set[tuple[Any, ...]] = set()


@lru_cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)  # on every rank: one may be alone with it


def _attend(q: Tensor, k: Tensor, v: Tensor, change: _ScoreFunction, scale: float) -> tuple[Tensor, Tensor]:
    """Return (out, lse), differentiable. Shapes: (B, H, S, D), (B, K, T, D) twice -> (B, H, S, D), (B, H, S) in float32."""
    with torch._dynamo.config.patch(recompile_limit=_FORMS):
        out, aux = compiled()(
            q, k, v, score_mod=change, scale=scale, enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True)
        )
    return out, aux.lse


@lru_cache
def compiled() -> Callable[..., Any]:
    """Return FlexAttention as one compiled function: a compilation for each form of the change, not for each block.

    Beyond `_FORMS` of them it is an error, and the tiled kernel's: torch would go on without a fused kernel, and make all scores.
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _changed(scores: Scores, positions: ScorePositions | None, causal: bool, dtype: torch.dtype) -> _ScoreFunction:
    """Return what changes one score, in FlexAttention's form: of indices within the block, which lies at `positions` of the whole."""
    assert positions is not None
    # Tensors: the compiler takes numbers for constants, and would compile anew for other rows and heads.
    first_row, first_head = (positions.queries.new_full((), part[0]) for part in (positions.rows, positions.heads))
    queries, keys = positions.queries, positions.keys
    cap = positions.queries.new_full((), scores.softcap, dtype=accumulator_dtype(dtype)) if scores.softcap else None
    bias, dense, score_mod, tensors = scores.bias, scores.dense, scores.score_mod, scores.tensors
    visible = None if scores.mask_mod is None else _visible(scores.mask_mod, queries.device)

    def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row, head, query, key = b + first_row, h + first_head, queries[q], keys[k]
        if cap is not None:
            score = torch.tanh(score / cap) * cap
        if bias is not None:
            score = score + _at(bias, row, head, query, key, 0.0).to(score.dtype)
        if score_mod is not None:
            score = score_mod.function(score, row, head, query, key, *tensors)
        if dense is not None:
            score = torch.where(_at(dense, row, head, query, key, False), score, -math.inf)
        if visible is not None:
            score = torch.where(visible(row, head, query, key), score, -math.inf)
        if causal:
            score = torch.where(q >= k, score, -math.inf)
        return score

    return change


def _at(whole: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor, beyond: float | bool) -> Tensor:
    """Return one number of a whole bias or mask; `beyond` where its queries or keys have ended.

    Shapes: whole (rows or 1, heads or 1, S or 1, T) -> ().
    """
    rows, heads, num_queries, num_keys = whole.shape
    zero = torch.zeros_like(query)
    line = zero if num_queries == 1 else query.clamp(max=num_queries - 1)
    found = whole[zero if rows == 1 else row, zero if heads == 1 else head, line, key.clamp(max=num_keys - 1)]
    there = key < num_keys
    if num_queries > 1:
        there = there & (query < num_queries)
    return torch.where(there, found, beyond)


def _visible(mask_mod: MaskMod, device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return whether a key is visible, by the function and the blocks in which it is asked."""
    table: BlockTable | None = mask_mod.table
    if table is None:
        return mask_mod.function
    asked, whole = table.asked.to(device), table.whole.to(device)
    (rows_of_block, keys_of_block), (num_queries, num_keys) = table.size, table.lengths
    num_rows, num_heads = asked.shape[:2]

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        zero = torch.zeros_like(query)
        at_query, at_key = query.clamp(max=num_queries - 1), key.clamp(max=num_keys - 1)
        block = (
            zero if num_rows == 1 else row, zero if num_heads == 1 else head, at_query // rows_of_block, at_key // keys_of_block
        )  # fmt: skip
        answer = mask_mod.function(row, head, at_query, at_key)
        return ((asked[block] & answer) | whole[block]) & (query < num_queries) & (key < num_keys)

    return visible


@contextmanager
def _gradients_allowed() -> Iterator[None]:
    """Let autograd work inside an operator, which PyTorch runs below it."""
    shut = torch._C._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD_KEYS:
        shut = shut.remove(getattr(torch._C.DispatchKey, name))
    guard: Any = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), shut)
    with guard, torch.enable_grad():
        yield


_AUTOGRAD_KEYS = ("AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView")
