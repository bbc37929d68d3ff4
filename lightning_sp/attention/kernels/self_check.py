"""A kernel that few have run on a kind of device is tried there on one small block before it is chosen, forward and backward."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_sp.attention.kernels.kernel import Kernel
from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.kernels.varlen import PackedKernel, Segments
from lightning_sp.attention.spec.positions import whole_positions
from lightning_sp.attention.spec.score_mod import MaskMod, ScoreMod
from lightning_sp.attention.spec.scores import Scores

# Of the largest element of each result: what sums in another order make of 64 keys, and far less than a wrong mask, scale or head does.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_SIZES = dict(rows=2, heads=4, kv_heads=2, queries=48)
# Where the sequences of a row begin and end, for a kernel that takes many lengths.
_SEQUENCES = (0, 31, 48)

# What `_results` asks of: a kernel's forward and its backward, of blocks of (B, H, S, D).
_Passes = tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor, Tensor]]]


def is_right(
    kind: type[Any], device: torch.device, dtype: torch.dtype, changes: tuple[str, ...] = (), head_dim: int = 16
) -> bool:
    """Return whether a kernel computes what plain torch does, on a device and in a dtype; told once a process, with one warning if not.

    Args:
        kind: the kernel's class.
        device: of the tensors.
        dtype: of the tensors.
        changes: of the scores, `Scores.names`: some of each are made up.
        head_dim: of the block: a kernel may have other code for another.

    The lse that the backward is given is larger than the block's own, as it is where other blocks have a part in a softmax. A kernel that takes
    sequences of many lengths in one call is asked that, too. What `torch.nn.attention.activate_flash_attention_impl` puts behind torch's
    operators is asked anew.
    """
    code = torch.nn.attention.current_flash_attention_impl()
    return answer(kind, device, dtype, changes, head_dim, code)  # type: ignore[arg-type]


@lru_cache
def answer(
    kind: type[Any],
    device: torch.device,
    dtype: torch.dtype,
    changes: tuple[str, ...],
    head_dim: int,
    code: str | None,
) -> bool:
    """Return `is_right`, which has what the answer is kept by; `code` is what stands behind torch's flash operator, None for its own."""
    try:
        worst = max(_error(kind, device, dtype, changes, head_dim, causal=causal) for causal in (True, False))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError) as error:  # schemas, kernels, FA4
        _warn(kind, device, dtype, code, f"it fails: {str(error).partition(chr(10))[0]}")
        return False
    if not worst <= _TOLERANCE[dtype]:
        _warn(kind, device, dtype, code, f"its numbers are off by {worst:.1e} (allowed: {_TOLERANCE[dtype]:.0e})")
        return False
    return True


def _warn(kind: type[Any], device: torch.device, dtype: torch.dtype, code: str | None, why: str) -> None:
    # On every rank that it is true of: one device may be another.
    by, back = "", ""
    if code is not None:
        by, back = f" by {code}", "; torch.nn.attention.restore_flash_attention_impl() takes torch's own again"
    warnings.warn(
        f"{kind.name}{by} is not used on {device} in {dtype}: on a small block {why}; {TiledKernel.name} does it, several times slower{back}",
        stacklevel=2,
    )


def _error(
    kind: type[Any], device: torch.device, dtype: torch.dtype, changes: tuple[str, ...], head_dim: int, *, causal: bool
) -> float:
    q, k, v, grad, others = _block(device, dtype, head_dim)
    scores = _scores(changes, q)
    kernel, plain = (kind(scores) if changes else kind()), TiledKernel(scores)
    asked: list[tuple[_Passes, _Passes]] = [((kernel.forward, kernel.backward), (plain.forward, plain.backward))]
    if isinstance(kernel, PackedKernel) and not changes:
        asked.append((_packed(kernel), _one_by_one(plain)))
    return max(_largest_error(*(_results(passes, q, k, v, grad, others, causal) for passes in both)) for both in asked)


def _largest_error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
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
    passes: _Passes, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, others: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    forward, backward = passes
    scale, positions = q.shape[-1] ** -0.5, whole_positions(q, k)
    out, lse = forward(q, k, v, causal=causal, scale=scale, positions=positions)
    together = torch.logaddexp(lse, others.to(lse.dtype))
    share = torch.exp(lse - together)[..., None]
    whole = (out.to(share.dtype) * share).to(out.dtype)
    gradients = backward(grad, q, k, v, whole, together, causal=causal, scale=scale, positions=positions)
    return out, lse, *gradients


def _packed(kernel: PackedKernel) -> _Passes:
    """Return the passes of sequences that lie one after the other, all in one call."""
    rows, length = _SIZES["rows"], _SEQUENCES[-1]
    starts = torch.tensor(
        [0, *(row * length + end for row in range(rows) for end in _SEQUENCES[1:])], dtype=torch.int32
    )
    longest = max(end - start for start, end in pairwise(_SEQUENCES))

    def one_call(
        call: Callable[..., tuple[Tensor, ...]], *tensors: Tensor, causal: bool, scale: float, **_: Any
    ) -> Any:
        starts_here = starts.to(tensors[0].device)
        segments = Segments(starts_here, starts_here, longest, longest)
        return tuple(map(_unpacked, call(*map(_in_one_row, tensors), segments, causal=causal, scale=scale)))

    return partial(one_call, kernel.forward_packed), partial(one_call, kernel.backward_packed)


def _in_one_row(tensor: Tensor) -> Tensor:
    """Lay rows one after the other. Shapes: (B, H, S, D) -> (B S, H, D), an lse (B, H, S) -> (H, B S)."""
    return tensor.transpose(1, 2).flatten(0, 1) if tensor.dim() == 4 else tensor.transpose(0, 1).flatten(1)


def _unpacked(tensor: Tensor) -> Tensor:
    """Undo `_in_one_row`."""
    rows = _SIZES["rows"]
    if tensor.dim() == 3:
        return tensor.view(rows, -1, *tensor.shape[1:]).transpose(1, 2)
    return tensor.view(len(tensor), rows, -1).transpose(0, 1)


def _one_by_one(kernel: Kernel) -> _Passes:
    """Return the passes of the same sequences, in a call for each."""

    def calls(call: Callable[..., tuple[Tensor, ...]], *tensors: Tensor, **options: Any) -> Any:
        parts = [[t[:, :, start:end] for t in tensors] for start, end in pairwise(_SEQUENCES)]
        found = [call(*part, **options | {"positions": whole_positions(part[0], part[1])}) for part in parts]
        return tuple(torch.cat(results, 2) for results in zip(*found, strict=True))

    return partial(calls, kernel.forward), partial(calls, kernel.backward)


def _block(device: torch.device, dtype: torch.dtype, dim: int) -> tuple[Tensor, ...]:
    """Return q, k, v, the gradient of out, and the lse of other blocks: drawn on the host, without touching its random stream."""
    generator = torch.Generator().manual_seed(0)
    rows, heads, kv_heads, queries = _SIZES.values()
    shapes = [
        (rows, heads, queries, dim),
        *[(rows, kv_heads, queries, dim)] * 2,
        (rows, heads, queries, dim),
        (rows, heads, queries),
    ]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return *(each.to(device, dtype) for each in made[:4]), made[4].to(device)
