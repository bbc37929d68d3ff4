"""A step whose logits wait is the step whose logits are made, in loss and every gradient; and no rank makes those of all its tokens."""

from __future__ import annotations

import pytest

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from lightning_sp.testing import max_error
from tests.loss.output_head import deferred_heads_ranks as ranks

RING, ULYSSES = dict(ring_size=2), dict(ulysses_size=2)
TOKENS, CHUNK = 2 * 16, 5
# Hugging Face's own loss is of float32 logits.
CASES = [
    (dict(model="gpt", step="by_hand", strategy={**RING, "preflight": True}), 1e-12),
    (dict(model="untied", step="frozen_head", strategy=ULYSSES), 1e-12),
    (dict(model="tied", step="own", strategy={**ULYSSES, "activation_checkpointing": True}), 1e-6),
    (dict(model="untied", step="left", strategy=RING), 1e-12),
]  # fmt: skip
MORE_CASES = [
    (dict(model="llama", step="metrics", strategy=ULYSSES), 1e-12),
    (dict(model="untied", step="by_hand", strategy=RING, accumulate_grad_batches=2), 1e-12),
    (dict(model="untied", step="public", strategy=RING), 1e-12),
    (dict(model="tied", step="by_hand", strategy=dict(data_parallel_size=2)), 1e-12),
    (dict(model="softcap", step="own", strategy={**RING, "preflight": True}), 1e-6),
]  # fmt: skip


@pytest.mark.parametrize(
    "chosen", [pytest.param(CASES, id="most"), pytest.param(MORE_CASES, id="more", marks=pytest.mark.slow)]
)
def test_losses_and_gradients_are_those_of_logits_that_are_made(pools, chosen):
    cases = [{**case, "chunk_tokens": chunk} for case, _ in chosen for chunk in (CHUNK, None)]
    for answers in pools(2).run(ranks.fits, cases):
        for (case, tolerance), own, made in zip(chosen, answers[::2], answers[1::2], strict=True):
            assert own["error"] + made["error"] == "", case
            assert len(own["losses"]) == len(made["losses"]) > 1
            assert len(own["grads"]) == len(made["grads"]) > 0
            pairs = [
                (step[n], g) for step, one in zip(own["grads"], made["grads"], strict=True) for n, g in one.items()
            ]
            assert max(max_error(a, b) for a, b in pairs) < tolerance, case
            numbers = zip(own["losses"] + own["seen"], made["losses"] + made["seen"], strict=True)
            assert all(abs(a - b) < tolerance * max(1.0, abs(b)) for a, b in numbers), case
            whole = case["step"] in ("left", "metrics") or case["strategy"].get("preflight")
            assert whole or own["tokens"] <= CHUNK, (case, own["tokens"])
            assert made["tokens"] >= TOKENS or case["step"] == "public"


@pytest.mark.parametrize("given", [0, "all", 2.5, True])
def test_a_chunk_that_is_no_number_of_tokens_is_refused(given):
    with pytest.raises(SequenceParallelError, match=r"loss_chunk_tokens=.*must be a positive integer or 'auto'"):
        SequenceParallelStrategy(loss_chunk_tokens=given)
