"""SIGTERM to one rank ends the run on all of them after the same batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sp.trainer.processes.preemption import superseded
from tests.slow import slow
from tests.trainer.processes import sigterm_ranks as ranks

pytest.importorskip("transformers")

NOTHING_SAVED = [
    "the run was told to end at step 3 and nothing is saved: it has no ModelCheckpoint, or fast_dev_run; enable_checkpointing=True saves it"
]


@pytest.mark.parametrize("layout", [dict(ring_size=2), dict(data_parallel_size=2)], ids=["ring", "groups"])
@pytest.mark.parametrize("rank", [1, *slow(0)])
def test_all_ranks_end_after_the_batch_that_follows(pools: Any, rank: int, layout: dict[str, int]):
    for found, says in zip(pools(2).run(ranks.told, rank, "train", layout), (NOTHING_SAVED, []), strict=True):
        # The signal comes within the second batch, is said of the third, and that one is trained.
        assert found == {"raised": "SIGTERMException", "code": 143, "steps": 3, "says": says}


@pytest.mark.slow
def test_a_validation_ends_on_all_ranks(pools: Any):
    for found in pools(2).run(ranks.told, 1, "validate", dict(ulysses_size=2)):
        assert found["raised"] == "SIGTERMException"
        assert found["steps"] == 6


@pytest.fixture(scope="module")
def whole(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """The run that nobody ends, by its accumulation."""
    folder = tmp_path_factory.mktemp("whole")
    return cache(
        lambda accumulate: pools(2).run(ranks.preempted, str(folder / str(accumulate)), "", 0, accumulate, False)[0]
    )


@pytest.mark.parametrize(
    ("stage", "at", "accumulate", "steps"),
    [
        pytest.param("train", 1, 1, 3, marks=pytest.mark.slow),
        # Said of the third batch, the first of its window.
        ("train", 1, 2, 2),
        # The last batch of an epoch.
        pytest.param("train", 4, 1, 6, marks=pytest.mark.slow),
        ("validate", 0, 1, 6),
    ],
    ids=["step", "window", "epoch's end", "validation"],
)
def test_a_run_that_is_told_to_end_saves_and_goes_on_as_if_it_had_not(
    pools: Any, whole: Any, tmp_path: Path, stage: str, at: int, accumulate: int, steps: int
):
    found, *_ = pools(2).run(ranks.preempted, str(tmp_path), stage, at, accumulate, True)
    assert found.pop("code") == 85
    assert found.pop("steps") == steps
    assert found.pop("latest") == "last-preempted.ckpt"
    # The checkpoint that it ended with is gone once a later one is found by "last", too.
    assert found == whole(accumulate)
    assert "last.ckpt" in found["left"]


@pytest.mark.parametrize(
    ("began", "written", "holds", "is_superseded"),
    [
        ("last-preempted.ckpt", "last.ckpt", ["optimizer_states"], True),
        ("last-preempted.ckpt", "last-v1.ckpt", ["optimizer_states"], True),
        # Not found by ckpt_path="last"; no fit goes on from weights alone; itself; elsewhere.
        ("last-preempted.ckpt", "epoch=1.ckpt", ["optimizer_states"], False),
        ("last-preempted.ckpt", "last.ckpt", [], False),
        ("last-preempted.ckpt", "last-preempted.ckpt", ["optimizer_states"], False),
        ("last-preempted.ckpt", "deep/last.ckpt", ["optimizer_states"], False),
        # Another run's.
        ("epoch=0.ckpt", "last.ckpt", ["optimizer_states"], False),
        (None, "last.ckpt", ["optimizer_states"], False),
    ],
)
def test_what_a_run_ended_with_goes_when_another_stands_for_it(
    tmp_path: Path, began: str | None, written: str, holds: list[str], is_superseded: bool
):
    trainer = SimpleNamespace(
        checkpoint_callbacks=[ModelCheckpoint(dirpath=tmp_path)],
        fast_dev_run=False,
        ckpt_path=None if began is None else tmp_path / began,
    )
    older = superseded(trainer, tmp_path / written, {key: [{}] for key in holds})
    assert older == (str(tmp_path / "last-preempted.ckpt") if is_superseded else None)


def test_a_signal_behind_the_last_batch_ends_the_next_run(pools: Any):
    """The fit is complete, and ends as it should: with code 0, if the script has nothing more to do."""
    one, other = pools(2).run(ranks.told_behind_the_last_batch, 1)
    assert one == {"steps": 12, "waits": 0, "code": 143, "handler": True, "left": 0}
    assert other == {"steps": 12, "waits": 1, "code": 143, "handler": True, "left": 0}
