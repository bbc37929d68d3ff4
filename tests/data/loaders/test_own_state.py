"""A loader that keeps its own state goes on from it: a resume equals the run that was not interrupted, and reads nothing again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_sp.data.loaders.broadcast_loader import BroadcastLoader
from lightning_sp.data.loaders.coordinates import DataCoordinates
from tests.data.loaders import own_state_ranks as ranks

ULYSSES, RING, GROUPS = dict(ulysses_size=2), dict(ring_size=2), dict(data_parallel_size=2)
HAS_TORCHDATA = pytest.mark.skipif(
    not pytest.importorskip("importlib.util").find_spec("torchdata"), reason="torchdata is not installed"
)
# 12 samples, 2 a step on one group: within the first epoch, its last step, within the second one, its last step.
CUTS = {"one": (2, 6, 8, 12), "two": (1, 3, 4, 6)}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert not found["error"], found["error"]
    assert found["losses"] == expected["losses"][-len(found["losses"]) :]
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name], weight), name


def variants() -> Iterator[Any]:
    """Each kind and each layout in the usual tests, all pairs in the slow ones."""
    usual = {("own", "ring")}
    for kind in ("own", "stream", "sequential", "shuffled", "generator"):
        for name, layout in {"ulysses": ULYSSES, "ring": RING, "groups": GROUPS}.items():
            if name == "groups" and kind not in ("own", "stream"):
                continue  # samplers of map-style data are dealt by index over groups, and read again
            marks = [
                *([] if kind == "own" else [HAS_TORCHDATA]),
                *([] if (kind, name) in usual else [pytest.mark.slow]),
            ]
            yield pytest.param(kind, layout, id=f"{kind}-{name}", marks=marks)


@pytest.mark.parametrize(("kind", "layout"), [*variants()])
def test_a_resume_goes_on_and_reads_nothing_again(pools, tmp_path, kind, layout):
    """Cut within the second epoch."""
    hold_resumes(pools, tmp_path, kind, layout, [2])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [*variants()])
def test_a_resume_goes_on_from_other_cuts(pools, tmp_path, kind, layout):
    """Within other epochs and at the end of one."""
    hold_resumes(pools, tmp_path, kind, layout, [0, 1, 3])


def hold_resumes(pools, tmp_path, kind, layout, some):
    groups = layout.get("data_parallel_size", 1)
    steps = 15 // groups
    cuts = [CUTS["one" if groups == 1 else "two"][i] for i in some]
    calls: list[Any] = [
        ((kind, layout), dict(steps=steps, save=str(tmp_path / str(cut)), save_after=cut)) for cut in cuts
    ]
    calls += [((kind, layout), dict(steps=steps, resume=str(tmp_path / str(cut)))) for cut in cuts]
    for answers in pools(2).run(ranks.several, calls):
        for cut, whole, resumed in zip(cuts, answers[: len(cuts)], answers[len(cuts) :], strict=True):
            same(resumed, whole)
            assert whole["before"] + resumed["numbers"] == whole["numbers"], cut
            assert "are read again" not in resumed["said"]
            if whole["reads"]:
                # Fetched ahead is one batch; a stream's first one is compared with what the other ranks would read.
                assert resumed["read"] <= len(resumed["numbers"]) + 2, cut
            else:
                assert resumed["read"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own"])
def test_other_groups_read_as_before_or_are_refused(pools, tmp_path, kind):
    within, end = str(tmp_path / "within"), str(tmp_path / "end")
    calls = [
        ((kind, GROUPS), dict(steps=3, save=within, save_after=1)),
        ((kind, GROUPS), dict(steps=3, save=end)),
        ((kind, ULYSSES), dict(steps=4, resume=within)),
        ((kind, ULYSSES), dict(steps=4, resume=end, rows=2, accumulate=2)),
    ]
    for _, _, refused, resumed in pools(2).run(ranks.several, calls):
        assert "data_parallel_size=2 and accumulate_grad_batches=2; this run has 1 and 2" in refused["error"]
        assert not resumed["error"], resumed["error"]


@pytest.mark.slow
def test_a_state_that_would_not_load_again_is_not_stored(pools, tmp_path):
    path = str(tmp_path / "strange")
    calls = [
        (("strange", RING), dict(steps=5, save=path, save_after=2)),
        (("strange", RING), dict(steps=5, resume=path)),
    ]
    for rank, (whole, resumed) in enumerate(pools(2).run(ranks.several, calls)):
        same(resumed, whole)
        if rank == 0:
            assert "the training loader's own state is not stored, for it is no plain value" in whole["said"]
            assert "strange'] is builtins.object" in whole["said"]
            assert "4 micro-batches of Loader are read again" in resumed["said"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "strange"])
def test_a_loader_that_is_made_anew_for_a_later_epoch_begins_at_its_start(pools, tmp_path, kind):
    calls = [
        ((kind, RING), dict(steps=15, save=str(tmp_path / "a"), save_after=2, anew=True)),
        ((kind, RING), dict(steps=15, resume=str(tmp_path / "a"), anew=True)),
    ]
    for whole, resumed in pools(2).run(ranks.several, calls):
        assert whole["before"] + resumed["numbers"] == whole["numbers"]
        same(resumed, whole)


@HAS_TORCHDATA
# torchdata itself asks torch by an old name.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["stream", "shuffled", "generator"])
# Ranks of a pool are daemons, which may have no workers: a loader alone, whose reader is this process.
def test_workers_that_fetch_ahead_are_not_ahead_in_the_state(kind, workers):
    def loader(start: Any = None, count: int = 0) -> BroadcastLoader:
        torch.manual_seed(3)
        made, _ = ranks.build(kind, 12, 2, {}, workers)
        found = BroadcastLoader(
            made, DataCoordinates(dp_rank=0, dp_size=1, sequence_group=None, control_group=None), None, 1
        )
        assert start is None or found.resume(start, count)
        return found

    def numbers(batches: Any) -> list[list[int]]:
        return [batch["number"].tolist() for batch in batches]

    whole = loader()
    expected, states = [], {}
    length = 12 if kind == "stream" and workers else 6  # each worker has a copy of the stream
    for epoch in range(2):
        for count, batch in enumerate(whole, 1):
            expected.append(batch["number"].tolist())
            states[epoch, count] = whole.own_states(count, finished=count == length)
    expected += numbers(whole)
    # Workers take a while to start.
    for epoch, count in [each for each in states if not workers or each[1] in (1, 4, length)]:
        resumed = loader(states[epoch, count], count % length)
        found = [each for _ in range(epoch + (count == length), 3) for each in numbers(resumed)]
        assert found == expected[epoch * length + count :], (epoch, count)
