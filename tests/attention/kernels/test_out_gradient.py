"""The vector along a gradient has the product with it that out has, and is no longer than out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sp.attention.kernels.out_gradient import delta_of, out_along_gradient

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [50, 9000])  # in one part, and in several
def test_the_product_is_that_of_out(dtype, tokens):
    torch.manual_seed(0)
    grad, out = (torch.randn(2, tokens, 3, 64).to(dtype).transpose(1, 2) for _ in range(2))
    grad[0, 0, 3] = 0
    grad[0, 0, 4] *= 1e-6 if dtype == torch.float16 else 1e-30  # its square is 0 in float32
    delta = delta_of(grad, out)
    along = out_along_gradient(grad, delta)
    assert (delta.dtype, along.dtype) == (torch.promote_types(dtype, torch.float32), dtype)
    assert along.stride() == grad.stride(), "token-major, as it came"
    grad, out, along = (t.double() for t in (grad, out, along))
    sizes = (grad.norm(dim=-1) * out.norm(dim=-1)).clamp_min(1e-300)
    error = ((grad * along).sum(-1) - (grad * out).sum(-1)).abs() / sizes
    assert error.max() < {torch.float64: 1e-15, torch.float32: 5e-7}.get(dtype, torch.finfo(dtype).eps)
    assert (along.norm(dim=-1) <= out.norm(dim=-1) * 1.01).all()
    assert not along[0, 0, 3].any()


class Operators(TorchDispatchMode):
    """Counts those that are no views."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_device_is_given_few_and_large_parts():
    """4 heads of 262,144 tokens: a cache of a core has room for a 128th, which a device has computed before the host begins the next."""
    grad, out = (torch.empty(1, 4, 262_144, 128, device="meta") for _ in range(2))
    with Operators() as operators:
        out_along_gradient(grad, delta_of(grad, out))
    assert operators.num < 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_is_not_finite_stays_so(dtype):
    grad, out = torch.ones(1, 1, 2, 8, dtype=dtype), torch.ones(1, 1, 2, 8, dtype=dtype)
    grad[0, 0, 0, 3] = torch.inf
    along = out_along_gradient(grad, delta_of(grad, out))
    assert along[0, 0, 0].isnan().any()
    assert torch.allclose(along[0, 0, 1], torch.ones(8, dtype=dtype))
