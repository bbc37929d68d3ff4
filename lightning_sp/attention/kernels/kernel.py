"""One local kernel call -> (out, lse), and its backward from a GLOBAL (out, lse). The only file that knows a kernel's private name.

Layout here is (B, H, S, D) with any strides, D contiguous; lse is (B, H, S), natural logarithm, float32 (float64 for float64). Keys and
values may have fewer heads (GQA). `causal` blocks are always square, so top-left (CPU) and bottom-right (CUDA) alignment agree.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.kernels.varlen import Segments
from lightning_sp.attention.spec.merge import accumulator_dtype
from lightning_sp.attention.spec.positions import Places
from lightning_sp.attention.spec.scores import SCORE_TILE, ScoreGradients, Scores
from lightning_sp.config import KERNELS
from lightning_sp.errors import SequenceParallelError, closest

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_DTYPES = (*_HALF, torch.float32, torch.float64)
MAX_FLASH_HEAD_DIM = 256
# Queries that a flash kernel's sums are rounded up to, and how many elements of them int32 can number.
_FLASH_ROWS = 128
_FLASH_ELEMENTS = 2**31


class Kernel(Protocol):
    """What every local kernel offers; `places` is read by those that change scores by where they lie."""

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, places: Places | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one block; shapes (B, H, S, D), (B, H, S)."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of one block from the global out and lse."""
        ...


class TorchCpuKernel:
    """PyTorch's own flash operator for the CPU: float32, float64, bfloat16, float16; GQA without a copy."""

    name = "torch flash (cpu)"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, places: Places | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one block."""
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of one block from the global out and lse."""
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return dq, dk, dv


class TorchCudaKernel:
    """PyTorch's own flash operator for CUDA (compute capability 8.0 and newer): bfloat16 and float16, GQA without a copy.

    Its head dim is a multiple of 8, up to 256: others are padded with zeros here, which changes no score and no gradient.
    `torch.nn.attention.activate_flash_attention_impl("FA3" | "FA4")` swaps the code behind the same operator. torch 2.11 to 2.13 expect two
    values of flash-attn-4, which returns four from 4.0.0b20 on: "FA4" needs an older one there.
    """

    name = "torch flash (cuda)"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, places: Places | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one block."""
        dim = q.shape[-1]
        q, k, v = (_bshd(t) for t in (q, k, v))
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return _bhsd(out, dim), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of one block from the global out and lse."""
        one = partial(self._backward, causal=causal, scale=scale)
        return by_heads(one, _rows(q), (grad, q, out), (k, v), lse, 1)

    def _backward(
        self, grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dim = q.shape[-1]
        grad, q, k, v, out = (_bshd(t) for t in (grad, q, k, v, out))
        # Dropout is 0, so the kernel reads no random state. No cum_seq: the dense form, in which the operator wants None.
        rng = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = _aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), None, None,
            q.shape[1], k.shape[1], 0.0, causal, rng, torch.empty((), dtype=torch.uint64, device=q.device), scale=scale,
        )  # fmt: skip
        return _bhsd(dq, dim), _bhsd(dk, dim), _bhsd(dv, dim)

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of many blocks, one after the other; shapes (T, H, D), (H, T)."""
        dim = q.shape[-1]
        q, k, v = (_padded(t) for t in (q, k, v))
        out, lse, *_ = _aten._flash_attention_forward(
            q,
            k,
            v,
            segments.queries,
            segments.keys,
            segments.max_queries,
            segments.max_keys,
            0.0,
            causal,
            False,
            scale=scale,
        )
        return out[..., :dim], lse

    def backward_packed(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, *,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of many blocks from the global out and lse."""
        rows = q.shape[0] + _FLASH_ROWS * len(segments.queries)
        one = partial(self._backward_packed, segments=segments, causal=causal, scale=scale)
        return by_heads(one, rows, (grad, q, out), (k, v), lse, 0)

    def _backward_packed(
        self, grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, *, segments: Segments,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dim = q.shape[-1]
        grad, q, k, v, out = (_padded(t) for t in (grad, q, k, v, out))
        rng = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = _aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), segments.queries, segments.keys,
            segments.max_queries, segments.max_keys, 0.0, causal, rng, torch.empty((), dtype=torch.uint64, device=q.device),
            scale=scale,
        )  # fmt: skip
        return dq[..., :dim], dk[..., :dim], dv[..., :dim]


class FlashAttnKernel:
    """The flash-attn package (2.7 to 2.x, whose two functions have this signature), for CUDA; asked for by ``kernel="flash_attn"``."""

    name = "flash-attn"

    def __init__(self, softcap: float = 0.0) -> None:
        self._interface = _flash_attn_interface()
        self.softcap = softcap

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, places: Places | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one block."""
        dim = q.shape[-1]
        q, k, v = (_bshd(t) for t in (q, k, v))
        out, lse, _, _ = self._interface._flash_attn_forward(
            q, k, v, 0.0, scale, causal=causal, window_size_left=-1, window_size_right=-1, softcap=self.softcap,
            alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        return _bhsd(out, dim), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of one block from the global out and lse."""
        one = partial(self._backward, causal=causal, scale=scale)
        return by_heads(one, _rows(q), (grad, q, out), (k, v), lse, 1)

    def _backward(
        self, grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dim = q.shape[-1]
        grad, q, k, v, out = (_bshd(t).contiguous() for t in (grad, q, k, v, out))
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        deterministic = torch.are_deterministic_algorithms_enabled()
        self._interface._flash_attn_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            dq,
            dk,
            dv,
            0.0,
            scale,
            causal,
            -1,
            -1,
            self.softcap,
            None,
            deterministic,
            None,
        )
        return _bhsd(dq, dim), _bhsd(dk, dim), _bhsd(dv, dim)


def check_kernel(name: str, device_type: str, dtype: torch.dtype, head_dim: int) -> None:
    """Refuse what no local kernel serves, from values that are equal on all ranks: called before the first collective.

    Raises:
        SequenceParallelError: an unknown kernel, a dtype or a head dim that it does not take.
    """
    if name not in KERNELS:
        raise SequenceParallelError(f"kernel={name!r}: must be one of {', '.join(KERNELS)}{closest(name, KERNELS)}")
    if dtype not in _DTYPES:
        raise SequenceParallelError(f"attention in {dtype}: must be one of {', '.join(map(str, _DTYPES))}")
    if name == "flash_attn" and (device_type != "cuda" or dtype not in _HALF):
        raise SequenceParallelError(
            f"kernel='flash_attn' with {dtype} on {device_type}: flash-attn takes bfloat16 and float16 on CUDA; "
            "use kernel='torch' or precision='bf16-true'/'bf16-mixed'"
        )
    if device_type == "cuda" and dtype in _HALF and head_dim > MAX_FLASH_HEAD_DIM:
        raise SequenceParallelError(
            f"head dim {head_dim} in {dtype} on CUDA: the flash kernels take at most {MAX_FLASH_HEAD_DIM}; use precision='32-true'"
        )


def select_kernel(
    name: str, device: torch.device, dtype: torch.dtype, scores: Scores, gradients: ScoreGradients | None = None
) -> Kernel:
    """Return the local kernel for an option, a device and a dtype that `check_kernel` let through.

    What a fused kernel does not compute goes to the tiled one, with one warning that names both.

    Args:
        name: the option.
        device: of the tensors.
        dtype: of the tensors.
        scores: what changes the scores.
        gradients: where a backward adds the gradients of what of it is learned.

    Raises:
        SequenceParallelError: flash_attn was asked for and is not installed, or the GPU is too old for a flash kernel.
    """
    if device.type == "cuda" and dtype in _HALF:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            raise SequenceParallelError(
                f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; the flash kernels need 8.0 or "
                "newer; use precision='32-true' there"
            )
    asked, serving = kernel_for(name, device.type, dtype, scores.names())
    if serving is not TiledKernel:
        fused: Kernel = serving(scores.softcap) if serving is FlashAttnKernel else serving()
        return fused
    if asked is not TiledKernel:
        _say_once(
            f"{asked.name} computes no {', '.join(scores.names())}: {TiledKernel.name} does it, several times slower and in tiles of "
            f"{SCORE_TILE} x {SCORE_TILE} scores"
        )
    return TiledKernel(scores, gradients)


def kernel_for(name: str, device_type: str, dtype: torch.dtype, changes: Sequence[str]) -> tuple[type[Any], type[Any]]:
    """Return the kernel for an option, a device and a dtype, and the one that serves in its place where scores are changed.

    Args:
        name: the option.
        device_type: "cpu" or "cuda".
        dtype: of the tensors.
        changes: of the scores, `Scores.names`.
    """
    if device_type == "cpu":
        asked: type[Any] = TorchCpuKernel
    elif dtype not in _HALF:
        # CUDA's flash operators take neither float32 nor float64: for exactness checks there.
        asked = TiledKernel
    else:
        asked = FlashAttnKernel if name == "flash_attn" else TorchCudaKernel
    fused = not changes or (asked is FlashAttnKernel and list(changes) == ["softcap"])
    return asked, asked if fused else TiledKernel


@lru_cache
def _say_once(text: str) -> None:
    rank_zero_warn(text)


def _flash_attn_interface() -> Any:
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError as error:
        # flash-attn-4 shares the import name, so the distribution decides.
        raise SequenceParallelError(
            "kernel='flash_attn' was asked for, but the distribution flash-attn is not installed; "
            "pip install 'lightning-sp[flash-attn]' on a machine with CUDA, or use kernel='torch'"
        ) from error
    major, minor = (int(part) for part in version.split(".")[:2])
    if major != 2 or minor < 7:
        raise SequenceParallelError(
            f"flash-attn {version} is installed; kernel='flash_attn' needs 2.7 or newer within 2.x, or use kernel='torch'"
        )
    return importlib.import_module("flash_attn.flash_attn_interface")


def by_heads(
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]], rows: int, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor],
    lse: Tensor, lse_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) of a flash kernel's backward: in one call, or where its int32 offsets would not do, in one for each key-value head.

    FlashAttention 2 up to 2.7 numbers the elements of its float32 sums of dQ, rows x heads x head dim, by 32 bits: beyond 2^31 of them,
    1M tokens of 32 heads of 128, it would write somewhere else.

    Args:
        backward: (*of_queries, *of_keys, lse) -> (dq, dk, dv), all but lse with heads in dim 1.
        rows: of those sums.
        of_queries: the gradient of out, q, out.
        of_keys: k and v.
        lse: of the query heads.
        lse_dim: its dimension of heads.
    """
    heads, kv_heads, dim = of_queries[0].shape[1], of_keys[0].shape[1], of_queries[0].shape[-1]
    rounded = -(-dim // 32) * 32 if dim <= 192 else MAX_FLASH_HEAD_DIM
    most, group = max(1, _FLASH_ELEMENTS // (rows * rounded)), heads // kv_heads
    if heads <= most:
        return backward(*of_queries, *of_keys, lse)
    dq = torch.empty_like(of_queries[1])
    dk, dv = (torch.zeros_like(t, dtype=accumulator_dtype(t.dtype)) for t in of_keys)
    for shared in range(kv_heads):
        end = (shared + 1) * group
        for start in range(shared * group, end, most):
            own = min(most, end - start)
            parts = [t.narrow(1, start, own) for t in of_queries] + [t.narrow(1, shared, 1) for t in of_keys]
            dq_part, dk_part, dv_part = backward(*parts, lse.narrow(lse_dim, start, own))
            dq.narrow(1, start, own).copy_(dq_part)
            dk.narrow(1, shared, 1).add_(dk_part)
            dv.narrow(1, shared, 1).add_(dv_part)
    return dq, dk.to(of_keys[0].dtype), dv.to(of_keys[1].dtype)


def _rows(q: Tensor) -> int:
    """Return the rows of a flash kernel's sums of dQ. Shapes: (B, H, S, D) -> ()."""
    return q.shape[0] * -(-q.shape[2] // _FLASH_ROWS) * _FLASH_ROWS


def _bshd(tensor: Tensor) -> Tensor:
    """Return what the flash kernels take: (B, H, S, D) -> (B, S, H, D), D padded with zeros to a multiple of 8."""
    return _padded(tensor.transpose(1, 2))


def _padded(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[-1] % 8
    return F.pad(tensor, (0, missing)) if missing else tensor


def _bhsd(tensor: Tensor, dim: int) -> Tensor:
    """Undo `_bshd`: (B, S, H, padded D) -> (B, H, S, D)."""
    return tensor[..., :dim].transpose(1, 2)
