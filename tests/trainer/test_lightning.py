"""Each feature of the Trainer gives on several ranks what plain Lightning gives on one device with the same module and loaders."""

from __future__ import annotations

from itertools import cycle

import pytest

from lightning_sp.testing import max_error
from tests.trainer import lightning_ranks as ranks

FEATURES = {
    "fast_dev_run": dict(fast_dev_run=3),
    "overfit_batches": dict(overfit_batches=2, max_epochs=2),
    "limits": dict(limit_train_batches=3, limit_val_batches=2, val_check_interval=1, max_epochs=2, max_time={"hours": 1}),
    "fractions of several validation loaders": dict(
        limit_train_batches=0.6, limit_val_batches=0.5, val_check_interval=0.5, val_loaders=2
    ),
    "no validation": dict(limit_val_batches=0, max_steps=3),
    "validation every n epochs": dict(check_val_every_n_epoch=2, max_epochs=4, limit_train_batches=2),
    "validation by steps": dict(check_val_every_n_epoch=None, val_check_interval=3, max_epochs=2),
    "sanity check": dict(num_sanity_val_steps=2),
    "early stopping": dict(early_stopping=True, max_epochs=6, limit_train_batches=2),
    "one cycle, clip by value": dict(
        module=dict(scheduler="one_cycle"), max_epochs=2, gradient_clip_val=0.01, gradient_clip_algorithm="value"
    ),
    "plateau": dict(module=dict(scheduler="plateau"), max_epochs=3, limit_train_batches=2),
    "manual optimization": dict(module=dict(manual=True)),
    "manual accumulation": dict(module=dict(manual=True, accumulate=2)),
}  # fmt: skip

# The preflight tries four of them, among them what moves the optimizer or validates before the first step; all in the slow test.
LAYOUTS = [dict(ring_size=2, preflight=False), dict(ulysses_size=2)]
# What they do to a run others here do too; the slow test runs all, in both layouts.
VARIANTS = ("fast_dev_run", "limits", "no validation", "validation by steps", "manual optimization")
TRIED = ("overfit_batches", "sanity check", "one cycle, clip by value", "manual accumulation")


def logged(actual, expected, name):
    assert set(actual) == set(expected), name
    for key, value in expected.items():
        # torchmetrics adds up in float32.
        assert actual[key] == pytest.approx(value, abs=2e-6 if "mean" in key else 1e-12), (name, key)


def same(actual, expected, name):
    for key in ("losses", "rates"):
        assert actual[key] == pytest.approx(expected[key], abs=1e-12), (name, key)
    assert len(actual["validated"]) == len(expected["validated"]), name
    for a, b in zip(actual["validated"], expected["validated"], strict=True):
        logged(a, b, name)
    for key in ("global_step", "epoch", "stopped_epoch"):
        assert actual[key] == expected[key], (name, key)
    for parameter, weight in expected["weights"].items():
        assert max_error(actual["weights"][parameter], weight) < 1e-10, (name, parameter)


def hold_features(pools, names, strategies, tried):
    alone = pools(1).run(ranks.runs, [dict(strategy=None, world=1, **FEATURES[n]) for n in names])[0]
    chosen = zip(names, cycle(strategies), strict=False)
    chosen = [(n, s if n in tried else {**s, "preflight": False}) for n, s in chosen]
    runs = [dict(strategy=s, world=2, **FEATURES[n]) for n, s in chosen]
    for answers in pools(2).run(ranks.runs, runs):
        for name, actual, expected in zip(names, answers, alone, strict=True):
            same(actual, expected, name)


def test_a_feature_of_the_trainer_is_as_on_one_device(pools):
    """A feature runs in one layout, the next one in the other: what it does to a step does not depend on it."""
    hold_features(pools, [name for name in FEATURES if name not in VARIANTS], LAYOUTS, TRIED)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [LAYOUTS, LAYOUTS[::-1]], ids=["tried by the preflight", "in the other layout"])
def test_a_feature_and_the_preflight(pools, layouts):
    hold_features(pools, list(FEATURES), layouts, list(FEATURES))


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["restarting", pytest.param("jumping", marks=pytest.mark.slow)])
def test_positions_alone_part_no_documents_where_that_is_declared(pools, positions):
    (expected,) = pools(1).run(ranks.runs, [dict(strategy=None, world=1, size=4, positions=positions)])[0]
    for strategy in (dict(ring_size=2, packed_documents=False), dict(ulysses_size=2, packed_documents=False)):
        (actual,) = pools(2).run(ranks.runs, [dict(strategy=strategy, world=2, size=4, positions=positions)])[0]
        same(actual, expected, positions)


def test_loggers_and_checkpoints_of_one_device(pools, tmp_path):
    common = dict(module=dict(scheduler="one_cycle"), max_epochs=2)
    alone = dict(strategy=None, world=1, folder=str(tmp_path / "alone"), **common)
    split = dict(strategy=dict(ring_size=2, preflight=False), world=2, folder=str(tmp_path / "split"), **common)
    (expected,), (actual,) = pools(1).run(ranks.runs, [alone])[0], pools(2).run(ranks.runs, [split])[0]
    same(actual, expected, "logged")
    assert actual["best"]
    assert expected["best"]
    assert len(actual["csv"]) == len(expected["csv"]) > 5
    for row, one in zip(actual["csv"], expected["csv"], strict=True):
        logged(row, one, "metrics.csv")


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_several_training_loaders_at_once_are_refused_by_name_without_the_global_view(pools, mode):
    for message in pools(2).run(ranks.several_training_loaders, mode):
        assert message.startswith("SequenceParallelError"), message
        assert "'code', 'text'" in message
        assert "ConcatDataset" in message


def test_a_step_that_fetches_its_batches_itself_is_refused_by_name(pools):
    for message in pools(2).run(ranks.unsupported, "dataloader_iter"):
        assert message.startswith("SequenceParallelError: training_step(dataloader_iter) fetches"), message
        assert "training_step(batch, batch_idx)" in message


def test_a_mean_of_integers_is_not_rounded_down(pools):
    assert pools(2).run(ranks.mean_of_ranks, {}) == [0.5, 0.5]


def test_tokens_are_counted_once_whoever_holds_them(pools):
    # 30 tokens are padded for four ranks, and five samples do not fill the last batch: what completes them does not count.
    for strategy, samples in (
        (dict(ring_size=4, preflight=False), 4),
        (dict(data_parallel_size=2, ring_size=2), 5),
        (dict(data_parallel_size=4, preflight=False), 5),
    ):
        assert pools(4).run(ranks.tokens_seen, strategy, 4, 30, samples) == [samples * 30] * 4, strategy


def test_metrics_of_samples_count_each_sample_once_with_the_data_parallel_group(pools):
    expected = pools(1).run(ranks.sample_metric, None, 1, 7)[0]
    assert expected["val_samples"] == 7
    for strategy in (
        dict(ring_size=4, preflight=False),
        dict(data_parallel_size=2, ring_size=2),
        dict(data_parallel_size=4, preflight=False),
    ):
        for found in pools(4).run(ranks.sample_metric, strategy, 4, 7):
            assert found["val_samples"] == 7, strategy
            assert found["val_mean"] == pytest.approx(expected["val_mean"], abs=2e-6)
