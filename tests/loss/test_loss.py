"""The loss is the mean over the global batch's valid tokens, whatever each rank holds: raw gradients against plain torch by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lightning_sp import sharded_cross_entropy
from lightning_sp.loss.reduction import mean_of_returned_sum
from lightning_sp.loss.token_weighting import TokenWindow
from lightning_sp.testing import max_error
from tests.loss import loss_ranks as ranks

RING, ULYSSES = dict(ring_size=2), dict(ulysses_size=2)
LINEAR = [
    dict(kind="linear", masks="uneven", strategy=RING, size=4, preflight=True),
    dict(kind="linear_chunks", masks="uneven", strategy=RING, size=4, preflight=True),
    dict(kind="linear_chunks", masks="uneven", strategy=ULYSSES, size=4, preflight=True),
]
# Each step has masks of its own: two steps; of windows of three or two micro-batches the last one is shorter.
CASES = [
    dict(kind="plain", masks="uneven", strategy=RING, preflight=True, size=4),
    dict(kind="plain", masks="empty shards", strategy=ULYSSES, size=4),
    dict(kind="plain", masks="ignored", strategy=RING),
    dict(kind="plain", masks="uneven", strategy=RING, accumulate=3, size=8),
    dict(kind="plain", masks="first ignored", strategy=RING, accumulate=3, size=8),
    dict(kind="by_hand", masks="uneven", strategy=RING, accumulate=3, size=8, preflight=True),
    dict(kind="summed_by_hand", masks="uneven", strategy=RING, preflight=True, size=4),
    dict(kind="counted", masks="uneven", strategy=ULYSSES, accumulate=3, size=8, preflight=True),
    dict(kind="weighted", masks="uneven", strategy=RING, accumulate=3, size=8, preflight=True),
    dict(kind="two", masks="uneven", strategy=RING, preflight=True, size=4),
    dict(kind="row_means", masks="uneven", strategy=RING, preflight=True, size=4),
    dict(kind="squared_beside_a_mean", masks="uneven", strategy=ULYSSES, accumulate=3, size=8),
    dict(kind="pooled", masks="uneven", strategy=RING, preflight=True, size=4),
    *(LINEAR[1:2] if hasattr(F, "linear_cross_entropy") else []),
]  # fmt: skip
# What these add up, count or shift is what others above do in another way.
MORE_CASES = [
    dict(kind="plain", masks="some ignored", strategy=ULYSSES, accumulate=2),
    dict(kind="summed", masks="uneven", strategy=ULYSSES, preflight=True, size=4),
    dict(kind="ignore_zero", masks="uneven", strategy=ULYSSES, accumulate=2, size=6),
    dict(kind="smoothed_probabilities", masks="uneven", strategy=ULYSSES, preflight=True, size=4),
    dict(kind="nll", masks="uneven", strategy=RING, accumulate=3, size=8, preflight=True),
    dict(kind="summed", masks="uneven", strategy=RING, accumulate=3, size=8),
    dict(kind="masked_by_hand", masks="uneven", strategy=RING, preflight=True, size=4),
    dict(kind="squared", masks="uneven", strategy=ULYSSES, accumulate=3, size=8, preflight=True),
    dict(kind="gathered", masks="uneven", strategy=RING, preflight=True, size=4),
    dict(kind="chunks", masks="uneven", strategy=RING, preflight=True, size=4),
    dict(kind="later_tokens", masks="uneven", strategy=RING, preflight=True, size=4),
    dict(kind="of_group_plainly", masks="uneven", strategy=dict(data_parallel_size=2), micro=4, preflight=True),
    dict(kind="two_alike", masks="uneven", strategy=RING, accumulate=3, size=8),
    dict(kind="plain", masks="ignored", strategy=RING, accumulate=2),
    dict(kind="module", masks="uneven", strategy=RING, accumulate=2, size=6),
    dict(kind="counted", masks="empty shards", strategy=ULYSSES, size=4),
    dict(kind="smoothed", masks="uneven", strategy=RING, accumulate=2, size=6),
    dict(kind="over_rows", masks="uneven", strategy=RING, preflight=True, size=4),
    dict(kind="smoothed_and_weighted", masks="uneven", strategy=RING, accumulate=2, size=6),
    dict(kind="probabilities", masks="uneven", strategy=RING, size=4),
    dict(kind="masked_nll", masks="uneven", strategy=ULYSSES, size=4),
    dict(kind="pooled_summed", masks="uneven", strategy=RING, preflight=True, size=4),
    dict(kind="by_name", masks="uneven", strategy=RING, accumulate=2, size=6),
    dict(kind="whole", masks="uneven", strategy=RING, accumulate=2, size=6),
    dict(kind="shifted_whole", masks="uneven", strategy=RING, size=4),
    *(LINEAR[::2] if hasattr(F, "linear_cross_entropy") else []),
]  # fmt: skip
DATA_PARALLEL = dict(data_parallel_size=2, ring_size=2, shard_size=2)
CASES_OF_4 = [
    dict(kind="plain", masks="uneven", strategy=DATA_PARALLEL, micro=4, accumulate=3, size=16, preflight=True),
    dict(kind="counted", masks="uneven", strategy=DATA_PARALLEL, micro=4, preflight=True),
    dict(kind="over_rows", masks="uneven", strategy=DATA_PARALLEL, micro=4, preflight=True),
    dict(kind="over_rows", masks="uneven", strategy=DATA_PARALLEL, micro=4, accumulate=2),
    dict(kind="chunks", masks="uneven", strategy=DATA_PARALLEL, micro=4, preflight=True),
    dict(kind="summed_by_hand", masks="uneven", strategy=DATA_PARALLEL, micro=4, preflight=True),
    dict(kind="row_means", masks="uneven", strategy=DATA_PARALLEL, micro=4, accumulate=2, preflight=True),
    dict(kind="masked_by_hand", masks="uneven", strategy=DATA_PARALLEL, micro=4, preflight=True),
    dict(kind="squared", masks="uneven", strategy=DATA_PARALLEL, micro=4, preflight=True),
    dict(kind="squared", masks="uneven", strategy=dict(data_parallel_size=4), micro=4, preflight=True),
    dict(kind="of_group", masks="uneven", strategy=DATA_PARALLEL, micro=4, preflight=True),
    dict(kind="kept", masks="of numbers that mislead", strategy=DATA_PARALLEL, micro=4, preflight=True),
    dict(kind="pooled", masks="uneven", strategy=DATA_PARALLEL, micro=4, preflight=True),
    dict(kind="pooled_summed", masks="uneven", strategy=DATA_PARALLEL, micro=4, preflight=True),
    dict(kind="probabilities", masks="uneven", strategy=DATA_PARALLEL, micro=4, preflight=True),
    dict(kind="weighted", masks="first ignored", strategy=dict(ulysses_size=2, ring_size=2), micro=4, accumulate=2),
]  # fmt: skip


def worst_error(answer, expected, compares_losses=True):
    assert len(answer["grads"]) == len(expected["grads"])
    errors = [
        max_error(step[name], gradient)
        for step, one in zip(answer["grads"], expected["grads"], strict=True)
        for name, gradient in one.items()
    ]
    for shown in (answer["losses"], answer["logged"]) if answer["losses"] and compares_losses else ():
        # A mean over nothing is nan on one device too.
        errors += [
            0.0 if math.isnan(a) and math.isnan(b) else abs(a - b)
            for a, b in zip(shown, expected["losses"], strict=True)
        ]
    return math.inf if any(math.isnan(e) for e in errors) else max(errors)


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(2, CASES, id="2"),
        pytest.param(2, MORE_CASES, id="2, more", marks=pytest.mark.slow),
        pytest.param(4, CASES_OF_4, id="4", marks=pytest.mark.slow),
    ],
)
def test_raw_gradients_and_the_logged_loss_are_those_of_all_tokens(pools, world, cases):
    cases = [{**case, "world": world} for case in cases]
    by_rank = pools(world).run(ranks.fits, cases)
    by_hand = [ranks.by_hand(**case) for case in cases]
    for answers in by_rank:
        for index, (case, answer, expected) in enumerate(zip(cases, answers, by_hand, strict=True)):
            assert not answer["error"], (case, answer["error"])
            # A loss of each group's own rows is shown as the group's, as in DDP.
            of_groups = case["kind"] in ("row_means", "squared", "over_rows", *ranks.OF_GROUPS)
            assert worst_error(answer, expected, not of_groups) < 1e-12, case
            if case["kind"] in ranks.OF_GROUPS:
                continue  # one device's is no mean of the groups'
            of_ranks = [each[index]["losses"] for each in by_rank]
            means = [sum(each) / world for each in zip(*of_ranks, strict=True)]
            pairs = list(zip(means, expected["losses"], strict=bool(means)))
            assert all(abs(a - b) < 1e-12 or (math.isnan(a) and math.isnan(b)) for a, b in pairs), case
            assert bool(answer["losses"]) == (case["kind"] != "counted")
            if case["masks"] == "ignored":
                assert all(map(math.isnan, answer["losses"])), "as torch's mean over nothing"
                assert all(not bool(g.any()) for step in answer["grads"] for g in step.values())


FAULTY = [
    ("local mean", dict(kind="plain", masks="uneven", strategy=RING)),
    ("local mean", dict(kind="plain", masks="empty shards", strategy=ULYSSES)),
    ("gradients scaled by the group's size", dict(kind="plain", masks="uneven", strategy=RING)),
    ("gradients scaled by the group's size", dict(kind="counted", masks="uneven", strategy=RING)),
    ("mean of micro-batch means", dict(kind="plain", masks="uneven", strategy=RING, accumulate=3, size=8)),
    ("nan where nothing counts", dict(kind="plain", masks="ignored", strategy=RING)),
    ("nan where nothing counts", dict(kind="plain", masks="first ignored", strategy=RING, accumulate=3, size=8)),
    ("a count of at least 1", dict(kind="weighted", masks="uneven", strategy=RING)),
]  # fmt: skip


@pytest.mark.slow
def test_the_cases_above_notice_the_faults_of_others(pools):
    cases = [{**case, "fault": fault} for fault, case in FAULTY]
    for answer, (fault, case) in zip(pools(2).run(ranks.fits, cases)[0], FAULTY, strict=True):
        assert not answer["error"], answer["error"]
        assert worst_error(answer, ranks.by_hand(**case)) > 1e-4, (fault, case)


REFUSED = [
    (dict(kind="two", masks="uneven", accumulate=2), "2 cross entropies with different token counts"),
    (dict(kind="pooled_locally", masks="uneven"), "one target for each row was given other numbers on ranks that share a sequence"),
    (dict(kind="squared_locally", masks="uneven"), "loss = batch_mean(F.mse_loss(output, target, reduction='none'), mask)"),
    (dict(kind="summed_in_part", masks="uneven", strategy=RING), "F.cross_entropy with reduction='sum' over an input (6, 61)"),
    (dict(kind="counted_at_times", masks="uneven", accumulate=2), "some have a mean cross_entropy and some have none"),
    (dict(kind="auxiliary", masks="uneven"), "training_step's loss differs between ranks"),
    (dict(kind="shifted_by_hand", masks="uneven"), "cross_entropy over 30 targets = 2 rows x (16 - 1)"),
]  # fmt: skip


def test_a_loss_that_is_no_mean_over_tokens_is_refused(pools):
    for answers in pools(2).run(ranks.fits, [case for case, _ in REFUSED]):
        for (case, part), answer in zip(REFUSED, answers, strict=True):
            assert part in answer["error"], (case, answer["error"])
            assert "NOT BY NAME" not in answer["error"]
            assert not answer["grads"], "before the first optimizer step"


REFUSED_OF_4 = [
    (dict(kind="of_all_over_rows", masks="uneven", strategy=DATA_PARALLEL, micro=4, preflight=True), "gives another result on shards"),
    (dict(kind="summed_by_hand_over_rows", masks="uneven", strategy=DATA_PARALLEL, micro=4, preflight=True), "gives another result on shards"),
    (dict(kind="chunks", masks="uneven", strategy=DATA_PARALLEL, micro=4), "7 cross entropies with reduction='sum' beside batch_mean"),
]  # fmt: skip


@pytest.mark.slow
def test_a_loss_that_is_right_on_one_sequence_alone_is_refused(pools):
    for answers in pools(4).run(ranks.fits, [{**case, "world": 4} for case, _ in REFUSED_OF_4]):
        for (case, part), answer in zip(REFUSED_OF_4, answers, strict=True):
            assert part in answer["error"], (case, answer["error"])
            assert not answer["grads"], "before the first optimizer step"


@pytest.mark.parametrize(("kind", "steps"), [("from_the_third_step", 3), ("in_the_last_step", 4)])
def test_a_term_that_joins_the_loss_later_is_found_one_step_late(pools, kind, steps):
    for answer in pools(2).run(ranks.fits, [dict(kind=f"auxiliary_{kind}", masks="uneven", strategy=RING)]):
        assert "training_step's loss differs between ranks" in answer[0]["error"], answer
        assert len(answer[0]["grads"]) == steps


def test_without_processes_it_is_plain_cross_entropy():
    logits = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([[1, 2, -100, 3, 0], [-100] * 5])
    flat = logits.flatten(0, 1), labels.flatten()
    assert sharded_cross_entropy(logits, labels).item() == pytest.approx(F.cross_entropy(*flat).item(), abs=1e-15)
    total = sharded_cross_entropy(logits, labels, reduction="sum").item()
    assert total == pytest.approx(F.cross_entropy(*flat, reduction="sum").item(), abs=1e-14)
    assert math.isnan(sharded_cross_entropy(logits, torch.full_like(labels, -100)).item())
    assert sharded_cross_entropy(logits.bfloat16(), labels).dtype == torch.float32


def test_a_window_without_any_token_multiplies_by_no_nan():
    window = TokenWindow()
    zero, loss = torch.tensor(0.0), torch.tensor(0.0)
    assert [float(window.weigh(loss, [zero])) for _ in range(2)] == [0.0, 0.0]
    assert float(window.close(2)) == 2.0
    assert window.close(2) is None, "a window ends once"


def test_a_returned_sum_keeps_what_else_was_returned():
    output, counts = mean_of_returned_sum({"loss": torch.tensor(6.0), "num_tokens": 4, "extra": 1}, None)
    assert (float(output["loss"]), output["extra"], [float(c) for c in counts]) == (1.5, 1, [4.0])
    assert mean_of_returned_sum(None, None) == (None, None)
