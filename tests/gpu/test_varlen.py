"""Blocks of many lengths in one kernel call: proven on the CPU by a kernel that takes them one by one; torch's operator gives shapes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lightning_sp.attention import AttentionMask, boundaries_from_lengths
from lightning_sp.attention.kernels import self_check
from lightning_sp.attention.kernels.merge import BlockKernel, HeadGroup, backward_step, forward_step
from lightning_sp.attention.kernels.torch_flash import TorchCpuKernel, TorchCudaKernel
from lightning_sp.attention.kernels.varlen import PackedKernel, Segments
from lightning_sp.attention.plan.blocks import Block
from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.attention.ranks.attention_ranks import inputs
from tests.drawn_cases import masks
from tests.gpu.emulated_ranks import emulate
from tests.gpu.test_emulated_ranks import METHODS, NAMES, expected
from tests.slow import slow

# What intervals say; the others are of the scores, which no fused kernel changes.
NAMED = [name for name, options in masks.NAMED.items() if not {"dense", "mask_mod"} & set(options)]
DEGREES = {"1x1": (1, 1), "2x2": (2, 2), "4x1": (4, 1), "1x4": (1, 4)}


class PackedCpuKernel(TorchCpuKernel):
    """The CPU's kernel, asked for each sequence of a call."""

    def __init__(self):
        self.sequences = []

    def forward_packed(self, q, k, v, segments, *, causal, scale):
        self.sequences.append(len(segments.queries) - 1)
        parts = [
            self.forward(*of(queries, q), *of(keys, k, v), causal=causal, scale=scale)
            for queries, keys in ranges(segments)
        ]
        return torch.cat([out[0].transpose(0, 1) for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    def backward_packed(self, grad, q, k, v, out, lse, segments, *, causal, scale):
        parts = []
        for queries, keys in ranges(segments):
            saved = (*of(queries, grad, q), *of(keys, k, v), *of(queries, out), lse[None, :, queries].contiguous())
            parts.append(self.backward(*saved, causal=causal, scale=scale))
        return tuple(torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in range(3))


class OfOneSequence(PackedCpuKernel):
    """All tokens of a call are one sequence's."""

    def forward_packed(self, q, k, v, segments, **options):
        ends = [0, -1]
        one = replace(segments, queries=segments.queries[ends], keys=segments.keys[ends])
        return super().forward_packed(q, k, v, one, **options)


class WithAnotherLse(PackedCpuKernel):
    """The lse of many lengths lies token by token."""

    def forward_packed(self, *args, **options):
        out, lse = super().forward_packed(*args, **options)
        return out, lse.T.reshape(lse.shape)


@pytest.mark.parametrize("kind", [OfOneSequence, WithAnotherLse])
def test_the_self_check_asks_for_many_lengths_too(kind):
    self_check.answer.cache_clear()
    assert self_check.is_right(PackedCpuKernel, torch.device("cpu"), torch.float64)
    with pytest.warns(
        UserWarning, match="is not used on cpu in torch.float64: on a small block its numbers are off by"
    ):
        assert not self_check.is_right(kind, torch.device("cpu"), torch.float64)


def ranges(segments):
    """Return each sequence's queries and keys."""
    starts = zip(*(pairwise(each.tolist()) for each in (segments.queries, segments.keys)), strict=True)
    return [(slice(*queries), slice(*keys)) for queries, keys in starts]


def of(tokens, *tensors):
    """Return a sequence's part of packed tensors, as a kernel takes one. Shapes: (T, H, D) -> (1, H, tokens, D)."""
    return [t[None, tokens].transpose(1, 2) for t in tensors]


FEW = [("hops", "1x1"), ("hops", "2x2"), ("all_gather", "1x4")]


@pytest.mark.parametrize(
    ("method", "ranks"), [*FEW, *slow(*(each for each in itertools.product(METHODS, DEGREES) if each not in FEW))]
)
def test_the_law_with_all_blocks_of_a_kind_in_one_call(method, ranks):
    degrees = DEGREES[ranks]
    for name in NAMED:
        kernel = PackedCpuKernel()
        assert isinstance(kernel, PackedKernel)
        for heads in [(8, 2), (6, 2)]:
            whole, mask = inputs(*heads, 32), masks.build(masks.NAMED[name], 32, 32)
            ways = dict(ulysses_size=degrees[0], ring_size=degrees[1], mask=mask, local_kernel=kernel, method=method)
            actual, _ = emulate(whole, **ways)
            assert_sharded_equals_unsharded(actual, expected(whole, mask), [f"{name} {heads} {n}" for n in NAMES])
        if "packed" in name or name.startswith("window "):
            assert max(kernel.sequences) > 1, name


def test_packed_documents_are_one_call():
    kernel, mask = PackedCpuKernel(), AttentionMask(boundaries=boundaries_from_lengths([[5, 20, 7], [3, 29]]))
    emulate(inputs(4, 4, 32), ulysses_size=1, ring_size=1, mask=mask, local_kernel=kernel)
    assert kernel.sequences == [5]


@pytest.mark.parametrize("row", [None, 0])
def test_queries_that_see_two_runs_of_keys_are_in_two_calls(row):
    blocks = [
        Block((0, 8), (0, 8), row=row),
        Block((8, 16), (0, 8), row=row),
        Block((8, 16), (12, 20), row=row, opens=False),
        Block((16, 24), (4, 12), row=row),
    ]
    mask = torch.zeros(1, 1, 24, 24, dtype=torch.bool)
    for block in blocks:
        mask[..., slice(*block.queries), slice(*block.keys)] = True
    q, k, v, grad = inputs(4, 2, 24, batch=1)
    wanted = expected([q, k, v, grad], AttentionMask(causal=False, dense=mask))
    kernel = PackedCpuKernel()
    together = BlockKernel(kernel, q.shape[-1] ** -0.5, (HeadGroup((0, 4), (0, 2)),))
    out, lse = forward_step(together, blocks, q, k, v, None)
    dq, dk, dv = backward_step(together, blocks, (grad, q, out, lse), (k, v), None)
    assert_sharded_equals_unsharded([out, dq, dk, dv], wanted, NAMES)
    assert kernel.sequences == [3, 1]


@pytest.mark.parametrize("dim", [64, 20])
def test_torchs_operator_takes_what_it_is_given(dim):
    q, k = (torch.empty(n, h, dim, device="meta", dtype=torch.bfloat16) for n, h in ((300, 8), (500, 2)))
    starts = torch.empty(4, dtype=torch.int32, device="meta")
    kernel, segments = TorchCudaKernel(), Segments(starts, starts, 128, 200)
    assert isinstance(kernel, PackedKernel)
    out, lse = kernel.forward_packed(q, k, k, segments, causal=True, scale=0.1)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (8, 300), torch.float32)
    gradients = kernel.backward_packed(q, q, k, k, out, lse, segments, causal=True, scale=0.1)
    assert [t.shape for t in gradients] == [q.shape, k.shape, k.shape]
