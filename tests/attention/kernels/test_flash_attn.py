"""flash-attn's functions, replaced by a note of their arguments: it installs on CUDA alone."""

from __future__ import annotations

import pytest

from lightning_sp.attention.kernels.flash_attn import FlashAttnKernel
from tests.attention.tensors import tensors


class FlashAttn:
    """The two functions of flash-attn 2.7, which installs on CUDA alone, with their signatures; they note what is asked for."""

    def __init__(self):
        self.asked = []

    def _flash_attn_forward(
        self, q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax,
    ):  # fmt: skip
        self.asked.append(
            (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
        )
        return q, q.new_empty(q.shape[0], q.shape[2], q.shape[1]), None, None

    def _flash_attn_backward(
        self, grad, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state,
    ):  # fmt: skip
        self.asked.append(
            (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
        )


@pytest.mark.parametrize("causal", [True, False])
def test_causal_reaches_flash_attn_and_no_window_does(causal):
    kernel = object.__new__(FlashAttnKernel)
    kernel._interface, kernel.softcap = FlashAttn(), 2.0
    (q,) = tensors((2, 4, 16, 8))
    out, lse = kernel.forward(q, q, q, causal=causal, scale=0.1)
    kernel.backward(out, q, q, q, out, lse, causal=causal, scale=0.1)
    assert kernel._interface.asked == [(0.0, 0.1, causal, -1, -1, 2.0, None)] * 2
