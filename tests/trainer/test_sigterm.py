"""SIGTERM to one rank ends the run on all of them after the same batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import sigterm_ranks as ranks

pytest.importorskip("transformers")

NOTHING_SAVED = [
    "the run was told to end at step 3 and nothing is saved: it has no ModelCheckpoint, or fast_dev_run; enable_checkpointing=True saves it"
]


@pytest.mark.parametrize("layout", [dict(ring_size=2), dict(data_parallel_size=2)], ids=["ring", "groups"])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_end_after_the_batch_that_follows(pools: Any, rank: int, layout: dict[str, int]):
    for found, says in zip(pools(2).run(ranks.told, rank, "train", layout), (NOTHING_SAVED, []), strict=True):
        # The signal comes within the second batch, is said of the third, and that one is trained.
        assert found == {"raised": "SIGTERMException", "code": 143, "steps": 3, "says": says}


def test_a_validation_ends_on_all_ranks(pools: Any):
    for found in pools(2).run(ranks.told, 1, "validate", dict(ulysses_size=2)):
        assert found["raised"] == "SIGTERMException"
        assert found["steps"] == 6


@pytest.fixture(scope="module")
def whole(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """The run that nobody ends, by its accumulation."""
    folder = tmp_path_factory.mktemp("whole")
    return cache(lambda accumulate: pools(2).run(ranks.preempted, str(folder), "", 0, accumulate, False)[0])


@pytest.mark.parametrize(
    ("stage", "at", "accumulate", "steps"),
    [
        ("train", 1, 1, 3),
        # Said of the third batch, the first of its window.
        ("train", 1, 2, 2),
        # The last batch of an epoch.
        ("train", 4, 1, 6),
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
    assert found == whole(accumulate)
