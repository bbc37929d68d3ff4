"""The flash-attn package's kernels, where it is installed."""

from __future__ import annotations

import importlib.metadata
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_sp.attention.kernels.flash_layout import accumulator_rows, by_heads, to_bhsd, to_bshd
from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.errors import SequenceParallelError


class FlashAttnKernel:
    """The flash-attn package (2.7 to 2.x, whose two functions have this signature), for CUDA; asked for by ``kernel="flash_attn"``."""

    name = "flash-attn"

    def __init__(self, softcap: float = 0.0) -> None:
        self._interface = _flash_attn_interface()
        self.softcap = softcap

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, positions: ScorePositions | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of one block."""
        dim = q.shape[-1]
        q, k, v = (to_bshd(t) for t in (q, k, v))
        out, lse, _, _ = self._interface._flash_attn_forward(
            q, k, v, 0.0, scale, causal=causal, window_size_left=-1, window_size_right=-1, softcap=self.softcap,
            alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        return to_bhsd(out, dim), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
        positions: ScorePositions | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return (dq, dk, dv) of one block from the global out and lse."""
        one = partial(self._backward, causal=causal, scale=scale)
        return by_heads(one, accumulator_rows(q), (grad, q, out), (k, v), lse, 1)

    def _backward(
        self, grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dim = q.shape[-1]
        grad, q, k, v, out = (to_bshd(t).contiguous() for t in (grad, q, k, v, out))
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
        return to_bhsd(dq, dim), to_bhsd(dk, dim), to_bhsd(dv, dim)


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
