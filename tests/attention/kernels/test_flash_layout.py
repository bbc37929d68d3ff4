"""What a flash kernel is given: padded head dims, and calls of at most so many numbers."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.attention.kernels import flash_layout
from lightning_sp.attention.kernels.flash_layout import by_heads, to_bhsd, to_bshd
from lightning_sp.attention.kernels.torch_flash import TorchCpuKernel
from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.attention.tensors import tensors


@pytest.mark.parametrize(
    ("heads", "kv_heads", "most", "calls"), [(8, 8, 8, 1), (8, 8, 3, 8), (8, 2, 5, 2), (8, 2, 3, 4), (6, 2, 1, 6)]
)
def test_a_backward_beyond_the_kernels_numbers_is_done_by_heads(monkeypatch, heads, kv_heads, most, calls):
    kernel, asked = TorchCpuKernel(), []
    q, k, v, grad = tensors((2, heads, 100, 16), (2, kv_heads, 60, 16), (2, kv_heads, 60, 16), (2, heads, 100, 16))
    out, lse = kernel.forward(q, k, v, causal=False, scale=0.2)
    expected = kernel.backward(grad, q, k, v, out, lse, causal=False, scale=0.2)

    def backward(grad, q, out, k, v, lse):
        asked.append((q.shape[1], k.shape[1]))
        assert len(asked) <= calls
        return kernel.backward(grad, q, k, v, out, lse.contiguous(), causal=False, scale=0.2)

    rows = 2 * 128
    monkeypatch.setattr(flash_layout, "_FLASH_ELEMENTS", most * rows * 32)
    found = by_heads(backward, rows, (grad, q, out), (k, v), lse, 1)
    assert len(asked) == calls
    assert max(own for own, _ in asked) <= most
    assert sum(own for own, _ in asked) == heads
    assert_sharded_equals_unsharded(found, expected, ["dq", "dk", "dv"])


@pytest.mark.parametrize(("dim", "taken"), [(64, 64), (20, 24), (3, 8)])
def test_head_dims_are_padded_with_zeros_to_what_flash_takes(dim, taken):
    (q,) = tensors((2, 4, 10, dim))
    padded = to_bshd(q)
    assert padded.shape == (2, 10, 4, taken)
    assert torch.equal(padded[..., dim:], torch.zeros(2, 10, 4, taken - dim, dtype=q.dtype))
    assert torch.equal(to_bhsd(padded, dim), q)
