"""bfloat16 and autocast: sharding adds no error of its own kind."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from lightning_sp.attention import AttentionMask
from lightning_sp.attention.reference import reference_attention
from lightning_sp.layout import SequenceLayout, merge
from tests.attention.ranks.attention_ranks import inputs, law_case, whole
from tests.attention.ranks.operator_ranks import autocast_results, local_results
from tests.slow import slow

NAMES = ("out", "dq", "dk", "dv")


def run(attend, q, k, v, grad):
    q, k, v = (t.clone().requires_grad_(True) for t in (q, k, v))
    out = attend(q, k, v)
    out.backward(grad.to(out.dtype))
    return [t.double() for t in (out.detach(), q.grad, k.grad, v.grad)]


def rms(tensor):
    return float(tensor.double().square().mean().sqrt())


WAYS = {
    "2x2": ((2, 2), "hops"),
    "4x1": ((4, 1), "hops"),
    "1x4": ((1, 4), "hops"),
    "1x4 gathered": ((1, 4), "all_gather"),
}
FEW = [(True, "4x1"), (True, "1x4"), (False, "2x2"), (False, "1x4 gathered")]


@pytest.mark.parametrize(
    ("causal", "way"), [*FEW, *slow(*(each for each in itertools.product((True, False), WAYS) if each not in FEW))]
)
def test_bfloat16_error_is_at_most_twice_the_unsharded_kernels(pools, causal, way):
    degrees, method = WAYS[way]
    heads, kv_heads, length, dim = 4, 2, 512, 32
    layout = SequenceLayout(degrees[1], degrees[0])
    for seed in range(3):
        whole = inputs(heads, kv_heads, length, batch=1, dim=dim, dtype=torch.bfloat16, seed=seed)
        exact = run(lambda q, k, v: reference_attention(q, k, v, AttentionMask(causal)), *(t.double() for t in whole))
        kernel = run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), *whole)
        case = (*degrees, heads, kv_heads, length, dim, torch.bfloat16, seed, causal, "network", method)
        ranks = pools(4).run(local_results, *case)
        for i, name in enumerate(NAMES):
            assert ranks[0][i].dtype == torch.bfloat16
            sharded = merge([rank[i] for rank in ranks], layout, dim=2)
            ratio = rms(sharded.double() - exact[i]) / rms(kernel[i] - exact[i])
            assert ratio <= 2, f"{name}, seed {seed}: {ratio:.2f} times the unsharded kernel's RMS error"


# Where the tiled kernel computes: dense masks, functions, biases, dropout, and what it shares with the fused ones.
CHANGED = [
    dict(mask=dict(dense=1)),
    dict(mask=dict(mask_mod="every third")),
    dict(mask=dict(window_size=(60, None)), score_mod="alibi"),
    dict(mask=dict(lengths=[[50, 190, 16], [256]]), bias="of heads", softcap=0.9),
    dict(mask={}, dropout=0.2, with_sinks=True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param((2, 2), id="2x2", marks=pytest.mark.slow),
        pytest.param((4, 1), id="4x1"),
        pytest.param((1, 4), id="1x4", marks=pytest.mark.slow),
    ],
)
def test_bfloat16_error_of_changed_scores_is_at_most_twice_the_unsharded(pools, degrees):
    cases = [dict(heads=6, kv_heads=2, length=256, seed=seed, **more) for more in CHANGED for seed in range(3)]
    sharded = [dict(ulysses=degrees[0], ring=degrees[1], dtype=torch.bfloat16, **case) for case in cases]
    alone = [dict(ulysses=1, ring=1, dtype=torch.bfloat16, **case) for case in cases]
    answers, unsharded = pools(4).run(law_case, sharded)[0], pools(1).run(law_case, alone)[0]
    for case, parts, kernel in zip(cases, answers, unsharded, strict=True):
        exact = whole(rounded=torch.bfloat16, **case)
        for i, name in enumerate(NAMES):
            assert parts[i].dtype == torch.bfloat16
            ratio = rms(parts[i].double() - exact[i]) / rms(kernel[i].double() - exact[i])
            assert ratio <= 2, f"{name} of {case}: {ratio:.2f} times the unsharded kernel's RMS error"


def test_autocast_casts_mixed_dtypes_as_sdpa_does(pools):
    q, k, v, grad = inputs(4, 2, 64, batch=1, dim=16, dtype=torch.float32)

    def attend(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v.to(torch.bfloat16), is_causal=True, enable_gqa=True)

    expected = run(attend, q, k, v, grad)
    for degrees in [(2, 1), (1, 2)]:
        ranks = pools(2).run(autocast_results, *degrees)
        assert [t.dtype for t in ranks[0]] == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
        layout = SequenceLayout(degrees[1], degrees[0])
        for i, name in enumerate(NAMES):
            error = rms(merge([rank[i] for rank in ranks], layout, dim=2).double() - expected[i]) / rms(expected[i])
            assert error < 1e-2, f"{degrees} {name}: {error}"
            if degrees == (2, 1) and name == "out":
                assert error == 0, "Ulysses runs the same kernel on the same numbers"
