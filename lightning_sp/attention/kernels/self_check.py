"""A kernel that few have run on a kind of device is tried there on one small block before it is chosen, forward and backward."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_sp.attention.kernels.kernel import Kernel
from lightning_sp.attention.kernels.tiled import TiledKernel

# Of the largest element of each result: what sums in another order make of 64 keys, and far less than a wrong mask, scale or head does.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_SIZES = dict(rows=2, heads=4, kv_heads=2, queries=48, dim=16)


@lru_cache
def is_right(kind: type[Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a kernel computes what plain torch does, on a device and in a dtype; told once a process, with one warning if not.

    The lse that the backward is given is larger than the block's own, as it is where other blocks have a part in a softmax.
    """
    try:
        worst = max(_error(kind(), device, dtype, causal=causal) for causal in (True, False))
    except (RuntimeError, NotImplementedError, TypeError) as error:  # the operator, its schema, its kernels
        _warn(kind, device, dtype, f"it fails: {str(error).partition(chr(10))[0]}")
        return False
    if not worst <= _TOLERANCE[dtype]:
        _warn(kind, device, dtype, f"its numbers are off by {worst:.1e} (allowed: {_TOLERANCE[dtype]:.0e})")
        return False
    return True


def _warn(kind: type[Any], device: torch.device, dtype: torch.dtype, why: str) -> None:
    # On every rank that it is true of: one device may be another.
    warnings.warn(
        f"{kind.name} is not used on {device} in {dtype}: on a small block {why}; {TiledKernel.name} does it, several times slower",
        stacklevel=2,
    )


def _error(kernel: Kernel, device: torch.device, dtype: torch.dtype, *, causal: bool) -> float:
    q, k, v, grad, others = _block(device, dtype)
    found, expected = ([*_results(each, q, k, v, grad, others, causal)] for each in (kernel, TiledKernel()))
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(found, expected, strict=True)
    )


def _results(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, others: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    scale = q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, causal=causal, scale=scale)
    together = torch.logaddexp(lse, others.to(lse.dtype))
    share = torch.exp(lse - together)[..., None]
    whole = (out.to(share.dtype) * share).to(out.dtype)
    return out, lse, *kernel.backward(grad, q, k, v, whole, together, causal=causal, scale=scale)


def _block(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, k, v, the gradient of out, and the lse of other blocks: drawn on the host, without touching its random stream."""
    generator = torch.Generator().manual_seed(0)
    rows, heads, kv_heads, queries, dim = _SIZES.values()
    shapes = [
        (rows, heads, queries, dim),
        *[(rows, kv_heads, queries, dim)] * 2,
        (rows, heads, queries, dim),
        (rows, heads, queries),
    ]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return *(each.to(device, dtype) for each in made[:4]), made[4].to(device)
