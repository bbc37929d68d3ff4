"""Each option, callback, plugin and hook of Lightning is honoured as on one device, or refused by name: docs/lightning.md."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.slow import slow
from tests.trainer.whole_runs import option_ranks as ranks

BAREBONES = dict.fromkeys(
    ("enable_checkpointing", "logger", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")
)
HONOURED = {
    **{hook: dict(hook=hook) for hook in ranks.HOOKS if hook not in ("schedule", "none", "replicated")},
    "schedule": dict(hook="schedule", scheduler="steps"),
    # What changes nothing of a step, and what looks on, is tried together.
    "detect_anomaly, deterministic, profiler, inference_mode": dict(
        detect_anomaly=True, deterministic=True, profiler="simple", inference_mode=False
    ),
    "barebones": dict(barebones=True, **BAREBONES),
    "gradient_clip_val": dict(gradient_clip_val=0.05),
    "reload_dataloaders_every_n_epochs": dict(reload_dataloaders_every_n_epochs=1, max_epochs=2),
    "min_steps": dict(min_steps=7, max_epochs=1),
    "finder": dict(callback="finder"),
    "thaw": dict(callback="thaw", max_epochs=2),
    **{name: dict(callback=name) for name in ("timer, lambda, summary, spikes", "accumulation of one, gradients")},
}
REFUSED = {
    "layers": (dict(plugin="layers"), "the plugin Layers is not asked: it would replace layers by ones that know nothing of 2 ranks"),
    "fsdp precision": (dict(plugin="fsdp precision", precision=None), "FSDPPrecision is for another strategy"),
    "io": (dict(plugin="io"), "the plugin Plugged would write no checkpoint: with save_distributed_checkpoint=True each of 2"),
    "async": (dict(plugin="async"), "the plugin AsyncCheckpointIO would write no checkpoint"),
    "accumulation": (dict(callback="accumulation"), "GradientAccumulationScheduler({0: 1, 1: 2}) changes the global batch"),
    "pruning": (dict(callback="pruning"), "the callback ModelPruning ranks the weights"),
    "throughput": (dict(callback="throughput", logger=True), "would report 2 times too many"),
    "on exception": (dict(callback="on exception", enable_checkpointing=True), "OnExceptionCheckpoint would save"),
    "save on exception": (dict(callback="save on exception", enable_checkpointing=True), "ModelCheckpoint would save"),
    "link": (
        dict(callback="link", enable_checkpointing=True, strategy=dict(ring_size=2, asynchronous_checkpoints=True)),
        "asynchronous_checkpoints=True with ModelCheckpoint(save_last='link'): the link would lead to a checkpoint that is not complete",
    ),
    "val_check_interval": (dict(val_check_interval={"seconds": 90}), "val_check_interval of 90 seconds: each of 2 ranks"),
    "gradients": (
        dict(callback="gradients", accumulate_grad_batches=3),
        "Gradients.on_after_backward with accumulate_grad_batches=3",
    ),
    "after_backward": (
        dict(hook="after_backward", accumulate_grad_batches=2),
        "on_after_backward with accumulate_grad_batches=2",
    ),
    "replicated": (dict(hook="replicated"), "model is a DataParallel, which would average gradients a second time"),
    # By Lightning itself.
    "none": (dict(hook="none"), "Skipping the `training_step` by returning None in distributed training"),
}  # fmt: skip


@pytest.mark.slow
def test_an_honoured_option_trains_as_on_one_device(pools):
    cases, strategy = list(HONOURED.values()), dict(ring_size=2, preflight=False)
    alone = pools(1).run(ranks.runs, [dict(strategy=None, world=1, **case) for case in cases])[0]
    for answers in pools(2).run(ranks.runs, [dict(strategy=strategy, world=2, **case) for case in cases]):
        for name, actual, expected in zip(HONOURED, answers, alone, strict=True):
            assert not expected["error"], (name, expected["error"])
            assert not actual["error"], (name, actual["error"])
            assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-10), name
            for key in ("called", "global_step", "epoch"):
                assert actual[key] == expected[key], (name, key)
            for parameter, weight in expected["weights"].items():
                assert max_error(actual["weights"][parameter], weight) < 1e-10, (name, parameter)


def test_what_cannot_be_honoured_is_refused_by_name(pools):
    cases = [{"strategy": dict(ring_size=2), "world": 2, **case} for case, _ in REFUSED.values()]
    for answers in pools(2).run(ranks.runs, cases):
        for (name, (_, words)), answer in zip(REFUSED.items(), answers, strict=True):
            assert words in answer["error"], (name, answer)


@pytest.mark.parametrize("kind", ["io", *slow("async")])
def test_a_checkpoint_plugin_writes_and_reads_whole_checkpoints(pools, tmp_path, kind):
    answers = pools(2).run(ranks.checkpointed, kind, str(tmp_path), 2)
    for rank, answer in enumerate(answers):
        assert not answer["error"], answer
        assert len(answer["losses"]) == 4, "a second epoch of two steps"
        assert "model.embedding.weight" in answer["names"]
        if kind == "io":
            assert answer["counts"] == {"saved": 1 - rank, "read": 1}
            assert answer["word"] == "word", "storage_options"


@pytest.mark.slow
def test_a_checkpoint_plugin_that_fails_on_rank_0_fails_on_all(pools, tmp_path):
    for answer in pools(2).run(ranks.checkpointed, "failing", str(tmp_path), 2):
        assert "could not be written: RuntimeError: the store is full" in answer["error"]


@pytest.mark.parametrize("how", ["dataset", pytest.param("sampler", marks=pytest.mark.slow)])
def test_a_users_split_is_not_split_again(pools, how):
    """Two data-parallel groups of two ranks: each sample once an epoch, whatever the default would make of the loaders."""
    layout = dict(data_parallel_size=2, ring_size=2, preflight=False)
    answers = pools(4).run(ranks.split_by_the_user, how, layout, 4)
    assert not [answer["error"] for answer in answers if answer["error"]]
    groups = [answers[0]["seen"], answers[2]["seen"]]
    assert [answers[1]["seen"], answers[3]["seen"]] == groups
    for epoch in range(2):
        assert sorted(groups[0][epoch] + groups[1][epoch]) == list(range(8)), (how, epoch)
    if how == "sampler":
        assert groups[0][0] != groups[0][1], "the sampler got no epoch"


@pytest.mark.parametrize("how", ["dataset by rank", "sampler by rank"])
def test_a_split_that_parts_the_ranks_of_a_sequence_is_refused(pools, how):
    for answer in pools(2).run(ranks.split_by_the_user, how, dict(ring_size=2), 2):
        assert "share one sequence but read different samples" in answer["error"], answer
        assert "data_parallel_rank" in answer["error"]


def test_predictions_are_written_as_on_one_device(pools):
    (expected,) = pools(1).run(ranks.written, None, 1)
    for answer in pools(2).run(ranks.written, dict(ring_size=2), 2):
        assert answer["indices"] == expected["indices"]
        for actual, one in zip(answer["predictions"], expected["predictions"], strict=True):
            assert max_error(actual, one) == 0
    for answer in pools(2).run(ranks.written, dict(data_parallel_size=2), 2):
        assert "Written writes what each rank predicts" in answer["error"]
        assert "data_parallel_size=2" in answer["error"]


@pytest.mark.slow
def test_a_loader_made_anew_in_each_epoch_is_read_from_its_start_after_a_resume(pools, tmp_path):
    for losses in pools(2).run(ranks.resumed_stream, str(tmp_path), 2):
        assert len(losses["at_once"]) == 12
        assert losses["begun"] + losses["resumed"] == pytest.approx(losses["at_once"], abs=1e-12)
