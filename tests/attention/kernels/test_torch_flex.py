"""FlexAttention as a kernel: its numbers are the tiled kernel's, by torch's own dense computation of it, which any device runs."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask

from lightning_sp.attention.kernels import select, self_check, torch_flex
from lightning_sp.attention.kernels.select import kernel_for, select_kernel
from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.kernels.torch_flex import TorchFlexKernel
from lightning_sp.attention.spec.block_mask import BlockTable
from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.attention.spec.score_mod import MaskMod, ScoreMod
from lightning_sp.attention.spec.scores import ScoreGradients, Scores
from lightning_sp.config import AttentionOptions

CPU = torch.device("cpu")
B, H, K, S, T, D, WHOLE = 2, 4, 2, 48, 48, 16, 120
# A rank's part lies anywhere, its keys in two runs; the second call has other rows and heads.
QUERIES, KEYS = torch.arange(60, 60 + S), torch.cat([torch.arange(10, 34), torch.arange(90, 114)])


@pytest.fixture
def dense(monkeypatch):
    """Let the compiled function run on the CPU, by torch's dense computation, and count its compilations."""
    compilations = []

    def eager(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch_flex._failed.clear()
    compiled = torch.compile(flex.flex_attention, backend=eager, dynamic=True, fullgraph=True)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "compiled", lambda: compiled)
    yield compilations
    torch._dynamo.reset()


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def changes(slope):
    """All at once: a cap, a bias and a mask that end before the sequence does, a function of the score, a mask's blocks and its function."""
    slopes = torch.linspace(0.1, slope, 2 * H)
    block_mask = create_block_mask(
        lambda row, head, q, k: (q + k) % 3 != head % 2, None, None, 110, 100, device="cpu", BLOCK_SIZE=16
    )
    block_mask.full_kv_num_blocks = torch.ones_like(block_mask.kv_num_blocks)
    block_mask.full_kv_indices = torch.zeros_like(block_mask.kv_indices)
    visible = drawn(2 * B, 1, 100, 105, seed=1) > -1
    visible[:, :, 70] = False
    score_mod = ScoreMod(lambda s, row, head, q, k, slopes: s - slopes[head] * (q - k).abs(), slopes)
    return Scores(
        softcap=2.0,
        bias=drawn(1, 2 * H, 100, 105),
        score_mod=score_mod,
        tensors=(slopes,),
        dense=visible,
        mask_mod=MaskMod(block_mask.mask_mod, BlockTable.of(block_mask)),
    )


def results(kernel, part, causal):
    positions = ScorePositions((part, part + B), (part, part + H), QUERIES, KEYS)
    q, k, v = drawn(B, H, S, D, seed=2), drawn(B, K, T, D, seed=3), drawn(B, K, T, D, seed=4)
    # The softmax is over other blocks too.
    out, lse = kernel.forward(q, k, v, causal=causal, scale=0.25, positions=positions)
    whole = torch.logaddexp(lse, drawn(B, H, S, seed=5))
    share = torch.exp(lse - whole)[..., None]
    grad = drawn(B, H, S, D, seed=6)
    back = kernel.backward(grad, q, k, v, out * share, whole, causal=causal, scale=0.25, positions=positions)
    return out, lse, *back


def test_its_numbers_are_the_tiled_kernels(dense):
    for part, causal in ((0, False), (1, False), (0, True)):
        scores = changes(slope=1.0 + part)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="torch flex")  # that it fails, and the tiled kernel serves
            found = results(TorchFlexKernel(scores), part, causal)
        expected = results(TiledKernel(scores), part, causal)
        assert bool((expected[1] == -math.inf).any())
        assert bool((expected[1] > -math.inf).any())
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
    # Forward and backward, without and with causal: none for other rows, heads and functions.
    assert len(dense) == 4


def test_a_function_that_does_not_compile_is_the_tiled_kernels(dense, monkeypatch):
    torch_flex._warn_once.cache_clear()
    compiled, calls = torch_flex.compiled(), []
    monkeypatch.setattr(torch_flex, "compiled", lambda: calls.append(1) or compiled)

    def mask(row, head, q, k):
        torch._dynamo.graph_break()
        return q >= k

    scores = Scores(mask_mod=MaskMod(mask))
    with pytest.warns(UserWarning, match="torch flex .cuda. fails with mask_mod: .*; torch tiled matmul computes it"):
        found = results(TorchFlexKernel(scores), 0, causal=False)
    results(TorchFlexKernel(Scores(mask_mod=MaskMod(mask))), 1, causal=False)
    assert len(calls) == 1, "what has failed is compiled again"
    for one, other in zip(found, results(TiledKernel(scores), 0, causal=False), strict=True):
        assert torch.equal(one, other)


def test_no_memory_is_no_reason_for_another_kernel(monkeypatch):
    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(torch_flex, "compiled", lambda: fails)
    with pytest.raises(torch.OutOfMemoryError):
        results(TorchFlexKernel(Scores(softcap=2.0)), 0, causal=False)


def test_it_serves_on_cuda_what_the_fused_kernels_do_not():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert kernel_for("auto", "cuda", dtype, ["mask_mod", "bias"])[1] is TorchFlexKernel
        assert kernel_for("auto", "cuda", dtype, ["mask_mod", "dropout"])[1] is TiledKernel
    assert kernel_for("auto", "cuda", torch.float64, ["softcap"])[1] is TiledKernel
    assert kernel_for("auto", "cpu", torch.float32, ["softcap"])[1] is TiledKernel
    assert kernel_for("flash_attn", "cuda", torch.bfloat16, ["softcap"])[1].__name__ == "FlashAttnKernel"


def test_it_is_taken_where_its_numbers_are_right_and_nothing_is_learned(monkeypatch):
    monkeypatch.setattr(select, "kernel_for", lambda *_: (SimpleNamespace(name="fused"), TorchFlexKernel))
    scores = Scores(softcap=2.0, bias=torch.zeros(1, 1, 8, 8))
    for right in (True, False):
        monkeypatch.setattr(select, "is_right", lambda kind, device, dtype, changes, dim, right=right: right)
        expected = TorchFlexKernel if right else TiledKernel
        assert type(select_kernel(AttentionOptions(), CPU, torch.float32, 16, scores)) is expected
    monkeypatch.setattr(select, "is_right", lambda *_: True)
    learned = ScoreGradients.like(scores, True)
    with pytest.warns(UserWarning, match="fused computes no softcap, bias, with gradients of what is learned of it,"):
        kernel = select_kernel(AttentionOptions(), CPU, torch.float32, 16, scores, learned)
    assert (type(kernel), kernel.gradients) == (TiledKernel, learned)
    assert type(select_kernel(AttentionOptions(), CPU, torch.float32, 16, scores, ScoreGradients())) is TorchFlexKernel


class ForgetsItsMask(TorchFlexKernel):
    """Hides nothing."""

    def __init__(self, scores):
        super().__init__(Scores(softcap=scores.softcap))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [("softcap", "bias", "score_mod"), ("softcap", "dense mask"), ("mask_mod",)])
def test_the_self_check_knows_each_change(dense, changes):
    self_check.answer.cache_clear()
    assert self_check.is_right(TorchFlexKernel, CPU, torch.float32, changes)
    with pytest.warns(UserWarning, match="its numbers are off by"):
        assert not self_check.is_right(ForgetsItsMask, CPU, torch.float32, changes)
    self_check.answer.cache_clear()
