"""The flash-attn package's kernels, where it is installed."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from lightning_sp.attention.kernels.flash_layout import FlashKernel
from lightning_sp.errors import SequenceParallelError


class FlashAttnKernel(FlashKernel):
    """The flash-attn package (2.7 to 2.x, whose two functions have this signature), for CUDA; asked for by ``kernel="flash_attn"``."""

    name = "flash-attn"

    def __init__(self, softcap: float = 0.0) -> None:
        self._interface = _flash_attn_interface()
        self.softcap = softcap

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, _, _ = self._interface._flash_attn_forward(
            q, k, v, 0.0, scale, causal=causal, window_size_left=-1, window_size_right=-1, softcap=self.softcap,
            alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        return out, lse

    def _backward(
        self, grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, out = (t.contiguous() for t in (grad, q, k, v, out))
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
        return dq, dk, dv


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
