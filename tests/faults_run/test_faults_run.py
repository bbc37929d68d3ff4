"""A fault of one rank ends all ranks, and is named: real runs, started as a user starts them. All of them write docs/faults.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults_run.runs import GOES_ON, run
from tests.faults_run.script import NAMES, OPTIONS, RESTARTED, SLOW

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
# An error of its own is told at once, and a deadlock within 10 s; a rank that does not come is warned of at half of timeout_s.
RAISED, DEADLOCK, LATE = 4.0, 10.0, 9.0
# On two busy cores a process takes seconds to end.
SLACK_S = 8.0
EXPECTED = {
    "SIGSTOP": ("rank 1 is stopped (process ", LATE),
    "SIGSTOP of rank 0": ("rank 0 is stopped (process ", LATE + 5),
    "SIGKILL": ("rank 1 has ended without a word (process ", RAISED),
    "os._exit(0)": ("rank 1 has ended without a word (process ", RAISED),
    "sys.exit(0)": ("rank 1 has raised SystemExit: 0, in tests/faults_run/script.py:", RAISED),
    "KeyboardInterrupt": ("rank 1 has raised KeyboardInterrupt, in tests/faults_run/script.py:", RAISED),
    "an error in training_step": ("rank 1 has raised ValueError: my own error, in tests/faults_run/script.py:", RAISED),
    "an error in training_step of rank 0": (
        "rank 0 has raised ValueError: my own error, in tests/faults_run/script.py:",
        RAISED,
    ),
    "an error, and a callback that takes long to end": (
        "rank 1 has raised ValueError: my own error, in tests/",
        DEADLOCK,
    ),
    "an error without a text": (
        "rank 1 has raised TextlessError: (its __str__ has raised LookupError), in tests/faults_run/script.py:",
        RAISED,
    ),
    "an error in the backward": (
        "rank 1 has raised ArithmeticError: in my backward hook, in tests/faults_run/script.py:",
        RAISED,
    ),
    "sleeps": ("rank 1 is in no collective, but in tests/faults_run/script.py:", LATE),
    "sleeps of rank 0": ("rank 0 is in no collective, but in tests/faults_run/script.py:", LATE),
    "an endless loop": ("rank 1 is in no collective, but in tests/faults_run/script.py:", LATE),
    "a barrier on one rank": ("rank 1 waits in barrier, called in tests/faults_run/script.py:", DEADLOCK),
    "an all_gather_object on one rank": (
        "rank 1 waits in all_gather_object (all_gather), called in tests/faults_run/script.py:",
        DEADLOCK,
    ),
    "training_step returns None on one rank": (
        "rank 1 has raised RuntimeError: Skipping the `training_step` by returning None",
        RAISED,
    ),
    "self.log(sync_dist=True) on one rank": ("_sync_ddp, from tests/faults_run/script.py:", DEADLOCK),
    "trainer.should_stop on one rank": (
        "ranks would go on in other ways: what comes next is a batch on rank 0; the end of a batch on rank 1",
        RAISED,
    ),
    "save_checkpoint on one rank": (" in _save_checkpoint, from tests/faults_run/script.py:", DEADLOCK),
    "save_checkpoint of rank 0": ("rank 0 waits in come_together, called in lightning_sp/strategy.py:", DEADLOCK),
    "an error in on_train_batch_end": (
        'rank 1 has raised KeyError: "my callback\'s error", in tests/faults_run/script.py:',
        RAISED,
    ),
    "zero_grad() on one rank": ("ranks have written to their parts of the model differently: the gradient of ", RAISED),
    "weight.data.mul_() on one rank": (
        "ranks have written to their parts of the model differently: model.head.weight is written to ",
        RAISED,
    ),
    "optimizer.state.clear() on one rank": (
        "differently: the optimizer's state of model.embedding.weight is written to 0 times, with ",
        RAISED,
    ),
    "whole_state_dict on one rank": ("in whole_state_dict, from tests/faults_run/script.py:", DEADLOCK),
    "an all_reduce of another size on one rank": (" has ended without a word (process ", RAISED),
    "destroy_process_group on one rank": (
        "rank 1 has destroyed its process groups in the run, in tests/faults_run/script.py:",
        RAISED,
    ),
    "eval() on one rank": (
        "modules in eval mode (their count, and the sum of their numbers) is (0, 0) on rank 0; (",
        RAISED,
    ),
    "another accumulate_grad_batches on one rank": ("accumulate_grad_batches is 1 on rank 0; 2 on rank 1", RAISED),
    "a weight frozen on one rank": ("ranks wait in different collectives", DEADLOCK),
    "a weight replaced on one rank": (
        "rank 1 has raised SequenceParallelError: model.head.weight, of shape (61, 32)",
        RAISED,
    ),
    "an error in the loader": ("rank 1 has raised OSError: cannot read sample, in tests/faults_run/script.py:", RAISED),
    "an error in a loader's worker": (
        "has raised OSError: Caught OSError in DataLoader worker process 0. OSError: cannot read sample (tests/faults_run/script.py:",
        RAISED,
    ),
    "an error that cannot be pickled in a loader's worker": (
        "has raised OSError: Caught OSError in DataLoader worker process 0. ",
        RAISED,
    ),
    "a batch with a lock in a loader's worker": (
        "a batch cannot be sent from its worker to the rank: TypeError: cannot pickle '_thread.lock' object",
        RAISED,
    ),
    "on_train_batch_start skips a batch on one rank": (
        "rank 1 waits in come_together, called in lightning_sp/trainer/agreed_stop.py:",
        DEADLOCK,
    ),
    "another nn.Dropout on one rank": (
        "none differ, but model.dropout is Dropout(p=0.5, inplace=False), on rank 0 Dropout(p=0.1, inplace=False)",
        RAISED,
    ),
    "parameters in another order on one rank": ("the order differs, in which messages are told apart: ", RAISED),
    "sys.exit(0) before the fit": ("rank 0 of 2 ends: rank 1 (process ", DEADLOCK),
    "an error behind the fit, others in an export": (
        "rank 1 has raised ValueError: behind the fit, in tests/faults_run/script.py:",
        RAISED,
    ),
    "sleeps in setup": ("rank 1 is in no collective, but in tests/faults_run/script.py:", LATE),
    "sleeps in teardown": ("rank 0 is done and waits for rank 1 (process ", LATE),
    "sleeps behind the fit": ("rank 0 is done and waits for rank 1 (process ", LATE),
    "sleeps between two runs": ("rank 1 has ended its run, without an error, at train, step 6", LATE),
    "a second run of one rank alone": ("rank 0 has come to the end of its script", DEADLOCK),
    "a second run of rank 0 alone": ("rank 1 has ended its run, without an error, at train, step 6", DEADLOCK),
    "max_time on one rank": ("Timer 0 is not given on rank 0; 'Timer' on rank 1", DEADLOCK),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", EXPECTED)
def test_a_fault_of_one_rank_is_named_and_ends_all(fault):
    words, within_s = EXPECTED[fault]
    outcome = run(fault)
    assert words in outcome.words, outcome.words
    assert outcome.named, outcome.words
    assert outcome.named[0][0] < within_s + SLACK_S / 2, outcome.words
    assert outcome.ended_s < OPTIONS["timeout_s"] + 5 + SLACK_S / 2, outcome.words
    assert outcome.processes == (
        fault == "SIGSTOP of rank 0"
    )  # it has started the others, and nobody is left to kill it
    assert outcome.shared_memory == []
    assert outcome.code != 0


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_go_on():
    outcome = run(RESTARTED)
    assert outcome.code == 0, outcome.words
    assert outcome.named, outcome.words
    assert "rank 1 has ended without a word (process " in outcome.named[0][1], outcome.words
    assert outcome.words.count(GOES_ON) == 1, outcome.words
    assert (outcome.processes, outcome.shared_memory) == (0, [])


@pytest.mark.slow
def test_a_rank_that_is_only_late_is_a_warning_and_no_error():
    outcome = run("late for a while")
    assert outcome.code == 0, outcome.words
    assert len(outcome.named) == 1, outcome.words
    assert "these do not come:\nrank 1 is in no collective, but in tests/faults_run/script.py:" in outcome.words


@pytest.mark.slow
def test_a_rank_that_is_slow_in_every_step_is_named_and_the_run_goes_on():
    outcome = run(SLOW)
    assert outcome.code == 0, outcome.words
    assert outcome.named, outcome.words
    assert all("rank 1 is slow, and the others wait: in the last " in line for _, line in outcome.named), outcome.words
    assert "of the looks in tests/faults_run/script.py:" in outcome.words
    assert " in on_train_batch_end" in outcome.words
    assert (outcome.processes, outcome.shared_memory) == (0, [])


def test_the_page_has_rows_of_faults_that_are_run():
    """`python -m tests.faults_run` writes those that are not there."""
    assert sorted([*EXPECTED, RESTARTED, SLOW]) == sorted(NAMES)
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().split("\n") if line.startswith("| ")]
    assert rows[1:] == [each for each in NAMES if each in rows]
    assert len(rows) > 12
