"""The operator's contract with PyTorch, on one process."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from lightning_sp.attention import (
    AttentionDropout,
    AttentionMask,
    alibi,
    boundaries_from_lengths,
    sequence_parallel_attention,
)
from lightning_sp.attention.fakes import Outputs
from lightning_sp.attention.operator import attention_backward_op, attention_op
from lightning_sp.attention.spec.codec import AttentionSpec, encode
from lightning_sp.attention.spec.scores import Scores
from lightning_sp.config import AttentionOptions
from tests.attention.tensors import tensors
from tests.slow import slow

EVERY = [*itertools.product(("zigzag", "assigned"), ("", "bias", "function"), (4, 1), ("dense", "packed"))]
# Every pair of what they differ in but one.
PAIRS = [
    ("zigzag", "", 4, "dense"),
    ("zigzag", "bias", 1, "packed"),
    ("zigzag", "function", 4, "packed"),
    ("assigned", "", 1, "packed"),
    ("assigned", "bias", 4, "dense"),
    ("assigned", "function", 1, "dense"),
]


# torch 2.15's own opcheck reads .grad of what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
@pytest.mark.filterwarnings("ignore:torch flash")
@pytest.mark.parametrize(
    ("layout", "scored", "kv_heads", "documents"), [*PAIRS, *slow(*(each for each in EVERY if each not in PAIRS))]
)
def test_the_operator_keeps_its_contract_with_pytorch(layout, scored, kv_heads, documents):
    assigned = torch.tensor([[0, 0, 7], [0, 7, 12]]) if layout == "assigned" else None
    boundaries = boundaries_from_lengths([[3, 9], [12]]) if documents == "packed" else None
    q, k, v = (t.requires_grad_(True) for t in tensors((2, 4, 12, 8), (2, kv_heads, 12, 8), (2, kv_heads, 12, 8)))
    mask = AttentionMask(boundaries=boundaries, window_size=(7, None))
    sinks = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    table = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    score_mod = alibi(table) if scored == "function" else None
    bias = torch.linspace(0, 1, 576, dtype=torch.float64).view(1, 12, 12, 4).requires_grad_(True) if scored else None
    bias = bias.permute(0, 3, 1, 2) if bias is not None else None  # of strides as T5's
    dropout = AttentionDropout(0.2, 3) if scored else None
    scores = Scores(bias=bias, score_mod=score_mod, tensors=(table,) if score_mod else (), dropout=dropout)
    code = encode(
        AttentionSpec(
            mask=mask, layout_table=assigned, scores=scores, sinks=sinks, scale=0.3, options=AttentionOptions()
        )
    )
    # What compares storages cannot look into torch.vmap, by which a function is applied; see `test_a_function_compiles`.
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    utils = utils[1:2] if score_mod else utils
    torch.library.opcheck(attention_op, (q, k, v, *code), test_utils=utils)
    made = Outputs(*attention_op(q, k, v, *code))
    saved = [t.detach() for t in (q, k, v)]
    out = made.out.detach()
    backward = (out, saved, made.saved_kv, made.visible, out, made.lse, 4, kv_heads, bool(scored), *code)
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
