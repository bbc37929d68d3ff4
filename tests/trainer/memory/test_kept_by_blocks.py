"""Blocks that write in their forward to what they keep, recomputed or compiled: a fit is that of one device."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

from lightning_sp.testing import max_error
from tests.trainer.memory import kept_by_blocks_ranks as ranks

KINDS = ("counter", "average", "generator", "lists")
OPTIONS = {
    "none": dict(activation_checkpointing="none"),
    "selective": dict(activation_checkpointing="selective"),
    "full": dict(activation_checkpointing="full", ulysses_size=2, ring_size=1),
    "offload": dict(activation_checkpointing="full", activation_offload="disk"),
    "global view": dict(activation_checkpointing="selective", global_view=True),
    "compiled": dict(activation_checkpointing="none", compile=True),
    "compiled, selective": dict(activation_checkpointing="selective", compile=True),
    "compiled, budget": dict(activation_checkpointing="budget_50", compile=True),
    "compiled in the global view": dict(activation_checkpointing="none", compile=True, global_view=True),
    "compiled in the global view, selective": dict(
        activation_checkpointing="selective", compile=True, global_view=True
    ),
}


# One of each two is enough each day: what decides is tried without a Trainer in tests/parallelize/recomputation/test_state_of_blocks.py.
FAST = {
    ("compiled in the global view, selective", "counter"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in FAST else pytest.mark.slow)
        for name in OPTIONS
        for kind in KINDS
    ],
)
def test_a_fit_is_that_of_one_device(pools, name, kind):
    options = OPTIONS[name]
    if "compiled in the global view" in name and Version(torch.__version__) < Version("2.13"):
        pytest.skip("torch.compile takes tensors that show whole sequences from torch 2.13 on")
    (alone,) = pools(1).run(ranks.run, kind, None, 1)
    for found in pools(2).run(ranks.run, kind, {"ring_size": 2, **options}, 2):
        assert not found["error"]
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        for name, weight in alone["weights"].items():
            assert max_error(found["weights"][name], weight) < 1e-10, name
        for mine, expected in zip(found["kept"], alone["kept"], strict=True):
            assert mine[0] == expected[0]
            assert mine[1] == pytest.approx(expected[1], rel=1e-12)
            assert mine[2:] == expected[2:]
        assert found["routed"] == 0
