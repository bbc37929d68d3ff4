"""The attention on one process: the operator's contract with PyTorch, and what the entry refuses."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from lightning_sp.attention import (
    AttentionDropout,
    AttentionMask,
    alibi,
    alibi_slopes,
    sequence_parallel_attention,
)
from lightning_sp.attention.reference import reference_attention
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout
from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.attention.tensors import tensors


def test_a_sink_that_takes_nothing_leaves_a_row_without_keys_at_zero():
    q, k, v = (t.requires_grad_(True) for t in tensors((1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8)))
    sinks = torch.tensor([-torch.inf, 0.5], dtype=torch.float64, requires_grad=True)
    mask = AttentionMask(valid=torch.tensor([[2, 6]]))
    out = sequence_parallel_attention(q, k, v, mesh=None, mask=mask, sinks=sinks)
    out.sum().backward()
    assert torch.equal(out[:, :, :2], torch.zeros_like(out[:, :, :2]))
    assert all(bool(t.isfinite().all()) for t in (out, q.grad, k.grad, v.grad, sinks.grad))
    assert sinks.grad[0] == 0


def test_nothing_is_computed_where_no_gradient_arrives():
    q, k, v = (t.requires_grad_(True) for t in tensors((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)))
    out = sequence_parallel_attention(q, k, v, mesh=None, mask=AttentionMask())
    (out * 0 + q).sum().backward()
    assert torch.equal(k.grad, torch.zeros_like(k))
    assert torch.equal(q.grad, torch.ones_like(q))


def test_without_a_mesh_it_is_sdpa_to_the_bit():
    shapes = (2, 4, 100, 16), (2, 2, 100, 16), (2, 2, 100, 16), (2, 4, 100, 16)
    *qkv, grad = tensors(*shapes, dtype=torch.float32)
    results = []
    for attend in (
        lambda q, k, v: sequence_parallel_attention(q, k, v, mesh=None, mask=AttentionMask()),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    ):
        leaves = [t.clone().requires_grad_(True) for t in qkv]
        out = attend(*leaves)
        out.backward(grad)
        results.append([out, *(t.grad for t in leaves)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (SequenceLayout(2, 1), "a layout of ring 2 x ulysses 1 on a mesh of ring 1 x ulysses 1: they must be equal"),
        (SequenceLayout(1, 1, (((0, 4), (4, 8)),)), "a sequence of 12 tokens in a layout made for a batch of 8 "),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout, message):
    q, k, v = tensors((1, 2, 12, 8), (1, 2, 12, 8), (1, 2, 12, 8))
    with pytest.raises(SequenceParallelError, match=re.escape(message)):
        sequence_parallel_attention(q, k, v, mesh=None, mask=AttentionMask(), layout=layout)


REFUSED = [
    (((2, 4, 8), (2, 4, 8, 8), (2, 4, 8, 8)), "q (2, 4, 8), k (2, 4, 8, 8), v (2, 4, 8, 8): must be (batch, heads, tokens, head dim)"),
    (((2, 4, 8, 8), (1, 4, 8, 8), (1, 4, 8, 8)), "the batch must be equal, and k, v have the same tokens and heads"),
    (((2, 4, 8, 8), (2, 4, 9, 8), (2, 4, 9, 8)), "8 queries over 9 keys with causal=True: cross attention has no order"),
    (((2, 4, 8, 8), (2, 4, 8, 8), (2, 2, 8, 8)), "k (2, 4, 8, 8), v (2, 2, 8, 8): the batch must be equal, and k, v have"),
    (((2, 4, 8, 8), (2, 3, 8, 8), (2, 3, 8, 8)), "the 4 query heads must be a multiple of the 3 key-value heads"),
    (((2, 4, 8, 8), (2, 4, 8, 16), (2, 4, 8, 16)), "the head dims of q and k must be equal"),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "message"), REFUSED)
def test_shapes_that_cannot_be_served_are_refused(shapes, message):
    with pytest.raises(SequenceParallelError, match=re.escape(message)):
        sequence_parallel_attention(*tensors(*shapes), mesh=None, mask=AttentionMask())


def test_mixed_dtypes_are_refused_outside_autocast_and_doubles_stay_apart_within():
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    message = "q torch.float64, k torch.float64, v torch.bfloat16: must be one dtype outside autocast"
    with pytest.raises(SequenceParallelError, match=re.escape(message)):
        sequence_parallel_attention(q, k, v.bfloat16(), mesh=None, mask=AttentionMask())
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(SequenceParallelError, match=re.escape(message)):
            sequence_parallel_attention(q, k, v.float(), mesh=None, mask=AttentionMask())
        assert sequence_parallel_attention(q, k, v, mesh=None, mask=AttentionMask()).dtype == torch.float64


@pytest.mark.filterwarnings("ignore:torch flash")
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(softcap=2.0),
        dict(bias=torch.randn(1, 4, 64, 64, generator=torch.Generator().manual_seed(3))),
        dict(score_mod=alibi(alibi_slopes(4))),
        dict(dropout=AttentionDropout(0.2, 7, 3, torch.tensor([0]))),
        dict(mask=AttentionMask(mask_mod=lambda row, head, query, key: (query + key) % 3 > 0)),
        dict(sinks=torch.linspace(-1, 1, 4)),
    ],
    ids=["plain", "softcap", "bias", "score_mod", "dropout", "mask_mod", "sinks"],
)
@pytest.mark.parametrize("backward_within", [False, True])
def test_autocast_rounds_what_it_is_given_and_no_sum_within(options, backward_within):
    q, k, v, grad = (t.bfloat16() for t in tensors(*[(1, 4, 64, 16)] * 4, dtype=torch.float32))

    def run(enabled):
        leaves = [t.clone().requires_grad_(True) for t in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = sequence_parallel_attention(*leaves, mesh=None, **{"mask": AttentionMask(), **options})
            if backward_within:
                out.backward(grad)
        if not backward_within:
            out.backward(grad)
        return [out, *(leaf.grad for leaf in leaves)]

    for within, without in zip(run(True), run(False), strict=True):
        assert within.dtype == torch.bfloat16
        assert torch.equal(within, without)


def test_the_entry_asks_the_kernel_before_anything_else():
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    with pytest.raises(SequenceParallelError, match=re.escape("kernel='flash_attn' with torch.float64 on cpu")):
        sequence_parallel_attention(q, k, v, mesh=None, mask=AttentionMask(), kernel="flash_attn")


def everything(**options):
    return torch.zeros(1, 1, 12, 12, **options)


EDGES = torch.tensor([[0, 12]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(bias=everything(dtype=torch.bool)), "bias of shape (1, 1, 12, 12), torch.bool: must be floating point"),
        (
            dict(bias=torch.zeros(1, 3, 12, 12)),
            "bias of shape (1, 3, 12, 12): must be (1 or 2 rows, 1 or 4 heads, 1 or the queries, the keys)",
        ),
        (dict(bias=torch.zeros(1, 1, 13, 12)), "of the sequence's 12 queries and 12 keys"),
        (dict(bias=torch.zeros(2, 1, 12, 1)), "bias of shape (2, 1, 12, 1): one number for 12 keys (padding included)"),
        (
            dict(mask=dict(dense=torch.ones(1, 1, 12, 1, dtype=torch.bool))),
            "keys are not broadcast: expand its last dim to the sequence's keys, dense.expand(-1, -1, -1, keys)",
        ),
        (dict(mask=dict(dense=everything())), "dense of shape (1, 1, 12, 12), torch.float32: must be bool"),
        (
            dict(mask=dict(dense=torch.ones(3, 1, 1, 12, dtype=torch.bool))),
            "dense of shape (3, 1, 1, 12): must be (1 or 2 rows, 1 or 4 heads",
        ),
        (
            dict(mask=dict(key_boundaries=EDGES)),
            "key_boundaries of shape (1, 2) with boundaries None: documents of queries and keys go in pairs",
        ),
        (
            dict(mask=dict(window_size=(3, None), boundaries=EDGES, key_boundaries=EDGES)),
            "key_boundaries with causal=True, window_size=(3, None): cross attention has no order",
        ),
        (
            dict(mask=dict(causal=False, boundaries=EDGES, key_boundaries=torch.tensor([[0, 10]]))),
            "key_boundaries end at 10 tokens, the (padded) keys are 12: they must be equal",
        ),
        (
            dict(dropout=AttentionDropout(0.1, samples=torch.arange(3))),
            "dropout.samples of shape (3,): must be one number for each of 2 rows",
        ),
        (dict(sinks=torch.zeros(3)), "sinks of shape (3,), must be one for each of 4 query heads"),
        (dict(softcap=0.0), "softcap=0.0: must be above 0, or None"),
        (dict(softcap=-2.0), "softcap=-2.0: must be above 0"),
    ],
)
def test_options_of_the_scores_are_checked(options, message):
    q, k, v = tensors((2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8))

    def attend(mask=None, **others):
        return sequence_parallel_attention(q, k, v, mesh=None, mask=AttentionMask(**(mask or {})), **others)

    with pytest.raises(SequenceParallelError, match=re.escape(message)):
        attend(**options)


def test_an_unknown_keyword_names_the_function_that_was_called():
    q = torch.ones(1, 2, 8, 4, dtype=torch.float64)
    with pytest.raises(
        TypeError, match=re.escape("sequence_parallel_attention() got an unexpected keyword argument 'ring'")
    ):
        sequence_parallel_attention(q, q, q, mesh=None, mask=AttentionMask(), ring=2)


@pytest.mark.filterwarnings("ignore:torch flash .cpu. computes no softcap")
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["fused", "tiled"])
def test_any_strides_are_read_right(options):
    """As a convolution leaves its channels, before the tokens, and as expanded tensors are."""
    plain = [t.requires_grad_() for t in tensors((2, 4, 48, 8), (2, 2, 48, 8), (2, 2, 48, 8))]
    strided = [t.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for t in plain]
    expanded = plain[:1] + [t.detach()[..., :1].expand(-1, -1, -1, 8).requires_grad_() for t in plain[1:]]
    grad = torch.ones((), dtype=torch.float64).expand(2, 4, 8, 48).transpose(2, 3)
    for given in (strided, expanded):
        out = sequence_parallel_attention(*given, mesh=None, mask=AttentionMask(), **options)
        expected = reference_attention(*given, AttentionMask(), **options)
        grads = [torch.autograd.grad(each, given, grad) for each in (out, expected)]
        assert_sharded_equals_unsharded(
            [out.detach(), *grads[0]], [expected.detach(), *grads[1]], ["out", "dq", "dk", "dv"]
        )
