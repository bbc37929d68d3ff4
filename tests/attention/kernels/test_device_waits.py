"""Masks and biases on a device: the host waits twice where one is searched, and not where it is computed, which gives the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

from lightning_sp.attention.kernels import tiled
from lightning_sp.attention.plan import block_sparsity
from lightning_sp.attention.plan.blocks import Plan
from lightning_sp.attention.spec import score_mod, scores
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.attention.spec.positions import whole_positions
from lightning_sp.attention.spec.score_mod import MaskMod
from lightning_sp.attention.spec.scores import ScoreGradients, Scores
from lightning_sp.layout import SequenceLayout
from lightning_sp.testing import assert_sharded_equals_unsharded

ROOT = Path(__file__).parents[3]
LENGTH, WHOLE = 1088, 1050


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot simulate a device",
)
def test_the_host_waits_where_a_mask_is_searched_and_nowhere_else():
    command = [sys.executable, "-W", "ignore", "-m", "tests.attention.kernels.mask_waits"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found == {"function": {"_searched": 2}, "matrix": {"_searched": 2}}


@pytest.mark.parametrize("mask", ["function", "matrix"])
def test_what_a_device_computes_without_asking_is_the_same(mask, monkeypatch):
    g = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(2, 2, LENGTH, 8, dtype=torch.float64, generator=g) for _ in range(4))
    bias = torch.randn(1, 2, WHOLE, WHOLE, dtype=torch.float64, generator=g)
    positions = torch.arange(WHOLE)
    documents = positions[:, None] // 300 == positions // 300
    changed = {
        "function": Scores(mask_mod=MaskMod(lambda row, head, query, key: query // 300 == key // 300), bias=bias),
        "matrix": Scores(dense=documents[None, None], bias=bias),
    }[mask]
    plan = Plan(AttentionMask(causal=False), SequenceLayout(), LENGTH, 2)

    def run():
        gradients = ScoreGradients.like(changed, wanted=True)
        kernel = tiled.TiledKernel(changed, gradients)
        where = whole_positions(q, k)
        out, lse = kernel.forward(q, k, v, causal=False, scale=0.3, positions=where)
        found = kernel.backward(grad, q, k, v, out, lse, causal=False, scale=0.3, positions=where)
        return [out, *found, gradients.bias], block_sparsity.search(changed, plan, 0, (0, 2), q, (None, None))

    on_host, known = run()
    for module in (tiled, scores, score_mod, block_sparsity):
        monkeypatch.setattr(module, "makes_host_wait", lambda _: True)
    on_device, found = run()
    assert_sharded_equals_unsharded(on_device, on_host, ["out", "q", "k", "v", "bias"])
    assert torch.equal(found, known)
    assert not found.all()
