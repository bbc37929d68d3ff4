"""The attention on one process: the operator's contract with PyTorch, and what the entry refuses."""

from __future__ import annotations

import re
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sp.attention import (
    AttentionDropout,
    AttentionMask,
    ScoreMod,
    alibi,
    alibi_slopes,
    boundaries_from_lengths,
    sequence_parallel_attention,
)
from lightning_sp.attention.kernels import flash_layout
from lightning_sp.attention.kernels.flash_attn import FlashAttnKernel
from lightning_sp.attention.kernels.flash_layout import by_heads, to_bhsd, to_bshd
from lightning_sp.attention.kernels.select import _say_once, check_kernel, select_kernel
from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.kernels.torch_flash import TorchCpuKernel, TorchCudaKernel
from lightning_sp.attention.operator import attention_backward_op, attention_op
from lightning_sp.attention.reference import reference_attention
from lightning_sp.attention.spec.position_bias import t5_bucket
from lightning_sp.attention.spec.positions import ScorePositions
from lightning_sp.attention.spec.score_mod import MaskMod, function_by_number
from lightning_sp.attention.spec.scores import Scores
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout
from lightning_sp.testing import assert_sharded_equals_unsharded, max_error


def tensors(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


# torch 2.15's own opcheck reads .grad of what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
@pytest.mark.parametrize("boundaries", [None, boundaries_from_lengths([[3, 9], [12]])], ids=["dense", "packed"])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.filterwarnings("ignore:torch flash")
@pytest.mark.parametrize("scored", ["", "bias", "function"])
@pytest.mark.parametrize("assigned", [None, torch.tensor([[0, 0, 7], [0, 7, 12]])], ids=["zigzag", "assigned"])
def test_the_operator_keeps_its_contract_with_pytorch(boundaries, kv_heads, scored, assigned):
    q, k, v = (t.requires_grad_(True) for t in tensors((2, 4, 12, 8), (2, kv_heads, 12, 8), (2, kv_heads, 12, 8)))
    mask = (*AttentionMask(boundaries=boundaries, window_size=(7, None)).arguments(), assigned)
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    table = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    score_mod = alibi(table) if scored == "function" else None
    bias = torch.linspace(0, 1, 576, dtype=torch.float64).view(1, 12, 12, 4).requires_grad_(True) if scored else None
    bias = bias.permute(0, 3, 1, 2) if bias is not None else None  # of strides as T5's
    dropout = AttentionDropout(0.2, 3) if scored else None
    scores = Scores(bias=bias, score_mod=score_mod, tensors=(table,) if score_mod else (), dropout=dropout).arguments()
    options = (*scores, sinks, 0.3, "", "", "auto", "auto", "auto")
    # What compares storages cannot look into torch.vmap, by which a function is applied; see `test_a_function_compiles`.
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    utils = utils[1:2] if score_mod else utils
    torch.library.opcheck(attention_op, (q, k, v, *mask, *options), test_utils=utils)
    out, lse, *_, kept, seen = attention_op(q, k, v, *mask, *options)
    saved = [t.detach() for t in (q, k, v)]
    backward = (out.detach(), saved, kept, seen, out.detach(), lse, *mask, *options, 4, kv_heads, bool(scored))
    # Not differentiable twice, so the test of its autograd does not apply.
    torch.library.opcheck(attention_backward_op, backward, test_utils=utils[::2] if score_mod is None else [])


@pytest.mark.filterwarnings("ignore:torch flash")
def test_a_function_compiles():
    q, k, v = tensors((2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8))
    slopes = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    score_mod, mask = alibi(slopes), AttentionMask(mask_mod=lambda row, head, query, key: (query + key) % 3 > 0)
    attend = partial(sequence_parallel_attention, mesh=None, mask=mask, score_mod=score_mod)
    results = []
    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        slopes.grad = None
        leaves = [t.clone().requires_grad_(True) for t in (q, k, v)]
        out = run(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), slopes.grad, *(t.grad for t in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_new_function_in_each_step_and_other_lengths_compile():
    """Its number is a symbol of the compiled graph from the second step on."""

    def attend(q, k, v, mask, score_mod):
        return sequence_parallel_attention(q, k, v, mesh=None, mask=mask, score_mod=score_mod)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for step, tokens in enumerate((12, 12, 12, 16, 20)):
        mask = AttentionMask(mask_mod=lambda row, head, query, key, step=step: (query + key) % (step + 2) > 0)
        slopes = torch.linspace(-1, step, 4, dtype=torch.float64, requires_grad=True)
        score_mod, results = alibi(slopes), []
        for run in (attend, compiled):
            slopes.grad = None
            leaves = [t.requires_grad_(True) for t in tensors((2, 4, tokens, 8), (2, 2, tokens, 8), (2, 2, tokens, 8))]
            out = run(*leaves, mask, score_mod)
            out.square().sum().backward()
            results.append([out.detach(), slopes.grad, *(t.grad for t in leaves)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), tokens


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flash-attn", "cuda", torch.bfloat16, 64), "kernel='flash-attn': must be one of auto, torch, flash_attn; did you mean 'flash_attn'?"),
        (("flash_attn", "cpu", torch.bfloat16, 64), "kernel='flash_attn' with torch.bfloat16 on cpu: flash-attn takes"),
        (("flash_attn", "cuda", torch.float32, 64), "kernel='flash_attn' with torch.float32 on cuda: flash-attn takes"),
        (("auto", "cuda", torch.bfloat16, 320), "head dim 320 in torch.bfloat16 on CUDA: the flash kernels take at most 256"),
        (("auto", "cpu", torch.int64, 64), "attention in torch.int64: must be one of torch.bfloat16, torch.float16"),
    ],
)  # fmt: skip
def test_kernels_refuse_what_they_do_not_take(arguments, message):
    with pytest.raises(SequenceParallelError, match=re.escape(message)):
        check_kernel(*arguments)


def test_the_entry_asks_the_kernel_before_anything_else():
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    with pytest.raises(SequenceParallelError, match=re.escape("kernel='flash_attn' with torch.float64 on cpu")):
        sequence_parallel_attention(q, k, v, mesh=None, mask=AttentionMask(), kernel="flash_attn")


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


@pytest.mark.parametrize(("dim", "taken"), [(64, 64), (20, 24), (3, 8)])
def test_head_dims_are_padded_with_zeros_to_what_flash_takes(dim, taken):
    (q,) = tensors((2, 4, 10, dim))
    padded = to_bshd(q)
    assert padded.shape == (2, 10, 4, taken)
    assert torch.equal(padded[..., dim:], torch.zeros(2, 10, 4, taken - dim, dtype=q.dtype))
    assert torch.equal(to_bhsd(padded, dim), q)


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_tiled_kernel_is_exact(causal, kv_heads, softcap):
    kernel = TiledKernel(Scores(softcap or 0.0), tile=8)
    everywhere = ScorePositions((0, 2), (0, 4), torch.arange(20), torch.arange(20))
    *qkv, grad = tensors((2, 4, 20, 8), (2, kv_heads, 20, 8), (2, kv_heads, 20, 8), (2, 4, 20, 8))
    out, lse = kernel.forward(*qkv, causal=causal, scale=0.3, places=everywhere)
    gradients = kernel.backward(grad, *qkv, out, lse, causal=causal, scale=0.3, places=everywhere)
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
    ways = dict(causal=False, scale=0.3, places=everywhere)
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


def test_what_a_fused_kernel_does_not_compute_goes_to_the_next_best_with_one_warning():
    _say_once.cache_clear()
    with pytest.warns(UserWarning, match="torch flash \\(cpu\\) computes no softcap: torch tiled matmul does it"):
        kernel = select_kernel("auto", torch.device("cpu"), torch.float32, Scores(30.0))
    assert (type(kernel), kernel.scores.softcap) == (TiledKernel, 30.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select_kernel("auto", torch.device("cpu"), torch.float32, Scores(30.0))
    assert isinstance(select_kernel("auto", torch.device("cpu"), torch.float32, Scores()), TorchCpuKernel)


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


def test_a_function_that_holds_what_learns_is_refused():
    slopes = torch.ones(4, requires_grad=True)
    message = re.escape("holds tensors of shapes [(4,)] that require a gradient, which would be lost")
    with pytest.raises(SequenceParallelError, match=message):
        ScoreMod(lambda score, row, head, query, key: score + slopes[head])
    fixed = slopes.detach()
    ScoreMod(lambda score, row, head, query, key: score + fixed[head])


def test_a_function_that_is_gone_is_named():
    number = ScoreMod(lambda score, *_: score).number
    with pytest.raises(SequenceParallelError, match=f"function {number} no longer exists"):
        function_by_number(number)


@pytest.mark.parametrize("probability", [-0.1, 1.0])
def test_a_dropout_that_is_no_probability_is_refused(probability):
    with pytest.raises(SequenceParallelError, match=f"dropout probability {probability}: must be at least 0 and below"):
        AttentionDropout(probability)


@pytest.mark.filterwarnings("ignore:torch flash")
def test_a_dropout_takes_any_seed_of_torch_and_no_longer_one():
    everywhere = ScorePositions((0, 1), (0, 2), torch.arange(8), torch.arange(8))
    largest = AttentionDropout(0.3, seed=2**64 - 1)
    assert torch.equal(largest.kept(everywhere), AttentionDropout(0.3, seed=-1).kept(everywhere))
    q, k, v = tensors((1, 2, 8, 8), (1, 2, 8, 8), (1, 2, 8, 8))
    sequence_parallel_attention(q, k, v, mesh=None, mask=AttentionMask(), dropout=largest)
    for name in ("seed", "call"):
        with pytest.raises(SequenceParallelError, match=f"dropout {name} {2**64}: must have at most 64 bits"):
            AttentionDropout(0.3, **{name: 2**64})


def test_dropout_keeps_its_share_and_no_two_of_its_masks_agree():
    everywhere = ScorePositions((0, 2), (0, 3), torch.arange(64), torch.arange(80))
    one = AttentionDropout(0.3, seed=1, call=2).kept(everywhere)
    masks = [one[0, 0], one[1, 0], one[0, 1], one[0, 0].roll(1, 0), one[0, 0].roll(1, 1)]
    others = ((1, 3), (2, 2), (2, 1), (-1, 2))
    masks += [AttentionDropout(0.3, seed, call).kept(everywhere)[0, 0] for seed, call in others]
    for i, a in enumerate(masks):
        assert abs(float(a.double().mean()) - 0.7) < 0.03
        for b in masks[:i]:
            # Two independent masks agree where both keep or both drop: 0.58 of 5,120 places, standard deviation 0.007.
            assert abs(float((a == b).double().mean()) - 0.58) < 0.04
    part = everywhere.part(row=1, queries=slice(5, 9), keys=slice(7, 20)).of_heads((1, 3))
    assert torch.equal(AttentionDropout(0.3, 1, 2).kept(part), one[1:2, 1:3, 5:9, 7:20])


def test_dropout_numbers_samples_and_not_rows():
    places = ScorePositions((0, 2), (0, 1), torch.arange(30), torch.arange(30))
    both = AttentionDropout(0.5, 1, samples=torch.tensor([7, 3])).kept(places)
    other = AttentionDropout(0.5, 1, samples=torch.tensor([3, 9])).kept(places)
    assert torch.equal(both[1], other[0])
    assert not torch.equal(both[0], other[1])


@pytest.mark.parametrize("heads", [8, 12])
def test_alibi_has_the_slopes_of_its_paper(heads):
    slopes = alibi_slopes(heads)
    assert slopes[:8].tolist() == [2.0 ** -(i + 1) for i in range(8)]
    assert slopes[8:].tolist() == pytest.approx([2.0 ** -(i + 0.5) for i in range(heads - 8)])


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_those_of_t5(bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-300, 300)
    theirs = T5Attention._relative_position_bucket(distances, bidirectional, 32, 128)
    assert torch.equal(t5_bucket(distances, 32, bidirectional=bidirectional, max_distance=128), theirs)


@pytest.mark.filterwarnings("ignore:torch flash .cpu. computes no score_mod")
def test_a_score_function_may_read_integers_and_only_the_others_learn():
    q, k, v = (torch.randn(1, 2, 12, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    kinds, table = torch.arange(12) % 3, torch.randn(3, dtype=torch.float64, requires_grad=True)
    change = ScoreMod(lambda s, row, head, i, j, kind, held: s + held[kind[i]] * held[kind[j]], kinds, table)
    out = sequence_parallel_attention(q, k, v, mesh=None, mask=AttentionMask(), score_mod=change)
    expected = reference_attention(q, k, v, AttentionMask(), score_mod=change)
    grads = [torch.autograd.grad(each.sin().sum(), (q, k, v, table)) for each in (out, expected)]
    assert_sharded_equals_unsharded(
        [out.detach(), *grads[0]], [expected.detach(), *grads[1]], ["out", "dq", "dk", "dv", "dtable"]
    )


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
