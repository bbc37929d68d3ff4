"""Behaviours of Lightning on two ranks of a sequence, or in two groups, beside plain Lightning on one process."""

from __future__ import annotations

import pytest

from tests.trainer.behaviours.all_of_them import runs
from tests.trainer.behaviours.harness import BEHAVIOURS, differences
from tests.trainer.behaviours.outcomes import OTHERWISE, REFUSED, REFUSED_BY_LIGHTNING
from tests.trainer.behaviours.page import TARGET, page

# What once was another number, or ended in another library's words; the first four in `make test`.
ONCE_WRONG = [
    "log loss sum synced",
    "log rows sum synced",
    "log tokens sum synced",
    "estimated_stepping_batches",
    "finetuning_resumed_thawed",
    "fully_shard_by_the_user",
    "torch_save_of_the_model",
    "deepcopy_of_the_module",
    "parameters_that_are_dtensors_already",
    "resume_behind_an_epoch_with_more_samples",
    "resume_behind_an_epoch_with_larger_batches",
    "resume_behind_an_epoch_with_accumulation",
]
# In groups a number of a batch is a group's own, as DDP has it, and what writes each rank's predictions is refused.
OF_BATCHES = [name for name in BEHAVIOURS if name.startswith(("log ", "error in"))]
OF_GROUPS = {
    "log_at_the_end_of_an_epoch", "log_dict", "torchmetrics_counts_tokens", "torchmetrics_logged", "several_validation_loaders",
    "prediction_writer_batch", "prediction_writer_epoch", "throughput_monitor", "iterable_dataset", "reload_dataloaders",
    "second_trainer_of_plain_lightning", "combined_loader_in_training", "order_of_hooks", "numbers_of_batches",
}  # fmt: skip


def hold(pools, tmp_path, names, strategy):
    expected = pools(1).run(runs, names, None, 1, str(tmp_path / "one"))[0]
    wrong = {}
    for answers in pools(2).run(runs, names, strategy, 2, str(tmp_path / "two")):
        for name in names:
            said = judged(name, answers[name], expected[name])
            if said:
                wrong[name] = said
    assert not wrong, wrong


def judged(name, answer, expected):
    """What is not as `outcomes` says, in words."""
    if name in REFUSED or name in REFUSED_BY_LIGHTNING:
        kind = "refused" if name in REFUSED else "raised"
        words = REFUSED.get(name) or REFUSED_BY_LIGHTNING[name]
        return [] if words in answer.get(kind, "") else [f"not {kind} with {words!r}: {str(answer)[:400]}"]
    found = differences(answer, expected)
    if name in OTHERWISE:
        return [] if found else ["as on one device, though listed as another number"]
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ONCE_WRONG[:4], id="most"),
        pytest.param(ONCE_WRONG[4:], id="more", marks=pytest.mark.slow),
    ],
)
def test_what_was_wrong_once(pools, tmp_path, names):
    hold(pools, tmp_path, names, dict(ring_size=2))


def test_what_the_preflight_does_not_tell_values_do(pools, tmp_path):
    """Without it a loss that all ranks of a sequence have still counts once, and tokens that each has add up."""
    hold(pools, tmp_path, ["log loss sum synced", "log targets sum synced"], dict(ulysses_size=2, preflight=False))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("start", range(0, len(BEHAVIOURS), 16))
def test_every_behaviour_on_the_ranks_of_a_sequence(pools, tmp_path, start):
    hold(pools, tmp_path, list(BEHAVIOURS)[start : start + 16], dict(ring_size=2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("start", range(0, len(BEHAVIOURS), 16))
def test_every_behaviour_in_two_groups(pools, tmp_path, start):
    names = [name for name in BEHAVIOURS if name not in OF_BATCHES and name not in OF_GROUPS][start : start + 16]
    if names:
        hold(pools, tmp_path, names, dict(data_parallel_size=2))


def test_what_is_not_as_on_one_device_is_a_behaviour():
    assert {*REFUSED, *REFUSED_BY_LIGHTNING, *OTHERWISE, *ONCE_WRONG, *OF_GROUPS} <= set(BEHAVIOURS)
    assert len(BEHAVIOURS) > 150


def test_the_page_is_that_of_the_behaviours():
    assert TARGET.read_text() == page(), "python -m tests.trainer.behaviours.page writes it"
