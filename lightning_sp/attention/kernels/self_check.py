"""A kernel that few have run on a kind of device is tried there on one small block before it is chosen, forward and backward."""

from __future__ import annotations

import math
import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_sp.attention.kernels.kernel import Kernel
from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.spec.positions import whole_positions
from lightning_sp.attention.spec.score_mod import MaskMod, ScoreMod
from lightning_sp.attention.spec.scores import Scores

# Of the largest element of each result: what sums in another order make of 64 keys, and far less than a wrong mask, scale or head does.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_SIZES = dict(rows=2, heads=4, kv_heads=2, queries=48, dim=16)


@lru_cache
def is_right(kind: type[Any], device: torch.device, dtype: torch.dtype, changes: tuple[str, ...] = ()) -> bool:
    """Return whether a kernel computes what plain torch does, on a device and in a dtype; told once a process, with one warning if not.

    Args:
        kind: the kernel's class.
        device: of the tensors.
        dtype: of the tensors.
        changes: of the scores, `Scores.names`: some of each are made up.

    The lse that the backward is given is larger than the block's own, as it is where other blocks have a part in a softmax.
    """
    try:
        worst = max(_error(kind, device, dtype, changes, causal=causal) for causal in (True, False))
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


def _error(
    kind: type[Any], device: torch.device, dtype: torch.dtype, changes: tuple[str, ...], *, causal: bool
) -> float:
    q, k, v, grad, others = _block(device, dtype)
    scores = _scores(changes, q)
    kernel: Kernel = kind(scores) if changes else kind()
    found, expected = ([*_results(each, q, k, v, grad, others, causal)] for each in (kernel, TiledKernel(scores)))
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    if any(not torch.equal(a == -math.inf, b == -math.inf) for a, b in pairs):
        return math.inf  # other queries see nothing
    pairs = [(a.masked_fill(a == -math.inf, 0.0), b.masked_fill(b == -math.inf, 0.0)) for a, b in pairs]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _scores(changes: tuple[str, ...], q: Tensor) -> Scores:
    """Return changes of these kinds, which hide all keys from some queries where they hide any."""
    _, heads, queries, _ = q.shape
    numbers = torch.arange(queries, device=q.device)
    made: dict[str, dict[str, Any]] = {
        "softcap": dict(softcap=1.5),
        "bias": dict(bias=torch.sin(torch.arange(heads, device=q.device)[:, None, None] + numbers)[None].to(q.dtype)),
        "score_mod": dict(score_mod=ScoreMod(lambda score, row, head, query, key: score - 0.1 * (query - key).abs())),
        "dense mask": dict(dense=((numbers[:, None] + 2 * numbers) % 3 > 0)[None, None] & (numbers[:, None] > 3)),
        "mask_mod": dict(mask_mod=MaskMod(lambda row, head, query, key: (query // 8 >= key // 8) & (query != 5))),
    }
    return Scores(**{name: value for change in changes for name, value in made[change].items()})


def _results(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, others: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    scale, positions = q.shape[-1] ** -0.5, whole_positions(q, k)
    out, lse = kernel.forward(q, k, v, causal=causal, scale=scale, positions=positions)
    together = torch.logaddexp(lse, others.to(lse.dtype))
    share = torch.exp(lse - together)[..., None]
    whole = (out.to(share.dtype) * share).to(out.dtype)
    gradients = kernel.backward(grad, q, k, v, whole, together, causal=causal, scale=scale, positions=positions)
    return out, lse, *gradients


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
