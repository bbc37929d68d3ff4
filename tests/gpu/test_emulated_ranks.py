"""Every layout of four ranks on ONE device, through the production code: proven on the CPU, then asked of each CUDA kernel.

What this shows of a GPU kernel: its log-sum-exp layout, its causal alignment, its GQA and head dims, a backward from a global (out, lse).
"""

from __future__ import annotations

import importlib.metadata
import itertools

import pytest
import torch

from lightning_sp.attention import AttentionMask, boundaries_from_lengths
from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.reference import reference_attention
from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.attention.ranks.attention_ranks import inputs
from tests.gpu.emulated_ranks import emulate
from tests.slow import slow

NAMES = ("out", "dq", "dk", "dv")
DEGREES = [(2, 2), (4, 1), (1, 4)]
HEADS = [(8, 8), (8, 2), (8, 1), (6, 2)]
LENGTHS = [None, [[100, 3, 409], [512]]]
WINDOW = (100, 60)
MASKS = pytest.mark.parametrize(
    ("lengths", "window"),
    [*((lengths, None) for lengths in LENGTHS), (None, WINDOW)],
    ids=["dense", "packed", "window"],
)

on_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the GPU kernels were not run here"),
    # A thread that is a rank has no context yet when it first multiplies: torch takes the device's, and says so.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
    pytest.mark.filterwarnings("ignore:attention in torch.float64 on cuda"),
]
# By its distribution: flash-attn-4 shares the import name.
INSTALLED = {distribution.name for distribution in importlib.metadata.distributions()}
FLASH_ATTN = pytest.param(
    "flash_attn",
    marks=pytest.mark.skipif(not {"flash-attn", "flash_attn"} & INSTALLED, reason="flash-attn is not installed"),
)

METHODS = ("hops", "all_gather")


def expected(whole, mask):
    q, k, v, grad = (t.clone() for t in whole)
    for t in (q, k, v):
        t.requires_grad_(True)
    out = reference_attention(q, k, v, mask)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


def mask_of(causal, lengths, window=None):
    sides = (window[0], None if causal else window[1]) if window else (None, None)
    return AttentionMask(causal, boundaries_from_lengths(lengths) if lengths else None, sides)


def compare_with_unsharded(whole, degrees, mask, kernel, stages=1):
    """Assert that the sharded RMS error is at most twice the unsharded kernel's, both against float32."""
    exact = expected([t.float() for t in whole], mask)
    unsharded, _ = emulate(whole, ulysses_size=1, ring_size=1, mask=mask, kernel=kernel)
    for method in METHODS if degrees[1] > 1 else METHODS[:1]:
        sharded, _ = emulate(
            whole, ulysses_size=degrees[0], ring_size=degrees[1], mask=mask, kernel=kernel, method=method, stages=stages
        )
        for name, ours, theirs, true in zip(NAMES, sharded, unsharded, exact, strict=True):
            own, kernels = ((t.float() - true).square().mean().sqrt().item() for t in (ours, theirs))
            assert own <= 2 * kernels, f"{name}, {method}: RMS error {own:.2e}, the unsharded kernel's {kernels:.2e}"
            # The unsharded kernel itself must be right, or twice its error means nothing.
            assert kernels <= 2e-2 * true.square().mean().sqrt().item(), f"{name}: {kernels:.2e}"


@pytest.mark.slow
@pytest.mark.parametrize("degrees", DEGREES, ids=["2x2", "4x1", "1x4"])
@MASKS
def test_bfloat16_through_the_emulation_on_the_cpu(degrees, lengths, window):
    for heads in [(8, 2), (6, 2)]:
        whole = inputs(*heads, 512, dim=20, dtype=torch.bfloat16)
        compare_with_unsharded(whole, degrees, mask_of(True, lengths, window), "auto")


@pytest.mark.slow
@pytest.mark.parametrize("degrees", DEGREES[:2], ids=["2x2", "4x1"])
@MASKS
def test_bfloat16_in_stages_that_share_keys(degrees, lengths, window):
    """Gradients of a key-value head from several stages add up in float32."""
    whole = inputs(8, 2, 512, dim=20, dtype=torch.bfloat16)
    compare_with_unsharded(whole, degrees, mask_of(True, lengths, window), "auto", stages=2)


KERNELS = {"torch cpu": None, "tiled": TiledKernel(tile=8)}
FEW = [
    ("hops", "torch cpu", (2, 2)),
    ("hops", "torch cpu", (4, 1)),
    ("all_gather", "torch cpu", (1, 4)),
    ("all_gather", "tiled", (2, 2)),
]


@pytest.mark.parametrize(
    ("method", "kernel", "degrees"),
    [*FEW, *slow(*(each for each in itertools.product(METHODS, KERNELS, DEGREES) if each not in FEW))],
)
def test_the_emulation_keeps_the_law_on_the_cpu(method, kernel, degrees):
    local_kernel = KERNELS[kernel]
    # In tiles Python is slow; both ways to share key-value heads are among these.
    for heads in HEADS if local_kernel is None else HEADS[1::2]:
        for lengths, window in ((None, None), ([[5, 20, 7], [32]], None), (None, (6, 3))):
            for causal in (True, False):
                whole, mask = inputs(*heads, 32), mask_of(causal, lengths, window)
                ways = dict(local_kernel=local_kernel, method=method, stages=2 if heads[0] == 8 else 1)
                actual, messages = emulate(whole, ulysses_size=degrees[0], ring_size=degrees[1], mask=mask, **ways)
                assert messages > 0
                assert_sharded_equals_unsharded(actual, expected(whole, mask), NAMES)


@pytest.mark.parametrize("degrees", DEGREES, ids=["2x2", "4x1", "1x4"])
@pytest.mark.parametrize("kernel", [pytest.param("torch"), FLASH_ATTN])
@pytest.mark.parametrize("dim", [64, 128, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
class TestHalfPrecisionOnCuda:
    pytestmark = on_cuda

    @pytest.mark.parametrize("causal", [True, False])
    @MASKS
    def test_error_is_at_most_twice_the_unsharded_kernels(self, degrees, kernel, dim, dtype, causal, lengths, window):
        for heads in HEADS:
            whole = [t.cuda() for t in inputs(*heads, 512, dim=dim, dtype=dtype)]
            compare_with_unsharded(whole, degrees, mask_of(causal, lengths, window), kernel)


@pytest.mark.parametrize("degrees", DEGREES, ids=["2x2", "4x1", "1x4"])
class TestExactOnCuda:
    pytestmark = on_cuda

    @pytest.mark.parametrize("causal", [True, False])
    @MASKS
    @pytest.mark.parametrize("method", METHODS)
    def test_float64_keeps_the_law(self, degrees, causal, lengths, window, method):
        for heads in HEADS:
            whole, mask = [t.cuda() for t in inputs(*heads, 512)], mask_of(causal, lengths, window)
            actual, _ = emulate(whole, ulysses_size=degrees[0], ring_size=degrees[1], mask=mask, method=method)
            assert_sharded_equals_unsharded(actual, expected(whole, mask), NAMES)
