"""The tiled kernel against the plain reference."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from lightning_sp.attention import (
    AttentionMask,
)
from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.kernels.torch_flash import TorchCpuKernel
from lightning_sp.attention.reference import reference_attention
from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.attention.spec.score_mod import MaskMod
from lightning_sp.attention.spec.scores import Scores
from lightning_sp.testing import assert_sharded_equals_unsharded, max_error
from tests.attention.tensors import tensors


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_tiled_kernel_is_exact(causal, kv_heads, softcap):
    kernel = TiledKernel(Scores(softcap=softcap or 0.0), tile=8)
    everywhere = ScorePositions((0, 2), (0, 4), torch.arange(20), torch.arange(20))
    *qkv, grad = tensors((2, 4, 20, 8), (2, kv_heads, 20, 8), (2, kv_heads, 20, 8), (2, 4, 20, 8))
    out, lse = kernel.forward(*qkv, causal=causal, scale=0.3, positions=everywhere)
    gradients = kernel.backward(grad, *qkv, out, lse, causal=causal, scale=0.3, positions=everywhere)
    leaves = [t.requires_grad_(True) for t in qkv]
    expected = reference_attention(*leaves, AttentionMask(causal), 0.3, softcap=softcap)
    expected.backward(grad)
    names = ("out", "dq", "dk", "dv")
    assert_sharded_equals_unsharded(
        [out, *gradients], [expected.detach(), *(t.grad for t in leaves)], names, tolerance=1e-12
    )


@pytest.mark.parametrize("given", ["function", "matrix", "both"])
def test_tiles_of_which_a_mask_hides_everything_are_not_computed(given):
    def seen(row, head, query, key):
        return (
            (query // 16 == key // 16) & (query >= key) & (query < 40)
        )  # documents of 16, and queries that see nothing

    places = torch.arange(48)
    dense = seen(0, 0, places[:, None], places)[None, None] if given != "function" else None
    mask_mod = MaskMod(seen) if given != "matrix" else None
    kernel = TiledKernel(Scores(dense=dense, mask_mod=mask_mod), tile=8)
    everywhere = ScorePositions((0, 2), (0, 4), places, places)
    *qkv, grad = tensors((2, 4, 48, 8), (2, 2, 48, 8), (2, 2, 48, 8), (2, 4, 48, 8))
    ways = dict(causal=False, scale=0.3, positions=everywhere)
    with mock.patch.object(TiledKernel, "_scores", autospec=True, side_effect=TiledKernel._scores) as tiles:
        out, lse = kernel.forward(*qkv, **ways)
        assert tiles.call_count == 3 + 3 + 1  # of 36
        gradients = kernel.backward(grad, *qkv, out, lse, **ways)
        assert tiles.call_count == 2 * 7
    leaves = [t.requires_grad_(True) for t in qkv]
    expected = reference_attention(*leaves, AttentionMask(causal=False, dense=dense, mask_mod=mask_mod), 0.3)
    expected.backward(grad)
    names = ("out", "dq", "dk", "dv")
    assert_sharded_equals_unsharded(
        [out, *gradients], [expected.detach(), *(t.grad for t in leaves)], names, tolerance=1e-12
    )
    assert bool((lse[:, :, 40:] == -torch.inf).all())


def test_the_tiled_kernel_takes_rectangles_and_bfloat16():
    kernel = TiledKernel(tile=16)
    q, k, v, grad = tensors((1, 4, 30, 8), (1, 2, 50, 8), (1, 2, 50, 8), (1, 4, 30, 8), dtype=torch.bfloat16)
    out, lse = kernel.forward(q, k, v, causal=False, scale=0.3)
    gradients = kernel.backward(grad, q, k, v, out, lse, causal=False, scale=0.3)
    fused = TorchCpuKernel()
    theirs = fused.forward(q, k, v, causal=False, scale=0.3)
    assert lse.dtype == theirs[1].dtype == torch.float32
    for ours, other in zip(
        [out, lse, *gradients], [*theirs, *fused.backward(grad, q, k, v, *theirs, causal=False, scale=0.3)], strict=True
    ):
        assert ours.dtype == other.dtype
        assert max_error(ours.double(), other.double()) < 2e-2
