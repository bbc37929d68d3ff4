"""PyTorch's flash operators on the meta device: what they are called with."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sp.attention.kernels.torch_flash import TorchCudaKernel


@pytest.mark.parametrize("dim", [64, 20])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_cuda_calls_fit_their_operators_schemas(dim, kv_heads):
    """On the meta device: arguments, None for cum_seq, shapes and lse layout; no number is computed, no GPU has run it."""
    kernel = TorchCudaKernel()
    q = torch.empty(2, 8, 100, dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, kv_heads, 60, dim, dtype=torch.bfloat16, device="meta")
    out, lse = kernel.forward(q, k, k, causal=False, scale=0.1)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    gradients = kernel.backward(out, q, k, k, out, lse, causal=False, scale=0.1)
    assert [t.shape for t in gradients] == [q.shape, k.shape, k.shape]


class Called(TorchDispatchMode):
    """Collects one argument of every operator that has it."""

    def __init__(self, name):
        super().__init__()
        self.name, self.values = name, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = dict(zip((a.name for a in operator._schema.arguments), args, strict=False)) | (kwargs or {})
        if self.name in given:
            self.values.append(given[self.name])
        return operator(*args, **(kwargs or {}))


def test_a_million_tokens_of_32_heads_go_by_key_value_heads():
    q, k = (torch.empty(1, heads, 2**20, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    lse = torch.empty(1, 32, 2**20, device="meta")
    with Called("max_q") as called:
        gradients = TorchCudaKernel().backward(q, q, k, k, q, lse, causal=True, scale=0.1)
        assert called.values == [2**20] * 8
        TorchCudaKernel().backward(*(t[:, :, : 2**19] for t in (q, q, k, k, q, lse)), causal=True, scale=0.1)
    assert called.values == [2**20] * 8 + [2**19]
    assert [t.shape for t in gradients] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize("causal", [True, False])
def test_causal_reaches_the_cuda_operators(causal):
    q = torch.empty(2, 4, 16, 8, dtype=torch.bfloat16, device="meta")
    with Called("is_causal") as called:
        out, lse = TorchCudaKernel().forward(q, q, q, causal=causal, scale=0.1)
        TorchCudaKernel().backward(out, q, q, q, out, lse, causal=causal, scale=0.1)
    assert called.values == [causal, causal]
