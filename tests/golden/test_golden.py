"""Twenty steps of one process, reproduced by every layout and by resumes on other degrees; and by plain Lightning without the strategy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden.ranks import HERE, NUM_STEPS, golden, several

STOP = 10
TWO = [(1, 2, 1), (2, 1, 1), (1, 1, 2)]
# Each of these degrees but a ring of 4 is in a run cut by a resume, balanced, in shards of 2, or of whole documents.
MORE = [(1, 2, 2), (2, 1, 2), (1, 4, 1), (1, 1, 4), (2, 2, 1)]
# Packed documents, dealt to the ring for each batch.
BALANCED = {"balance": "documents"}
RINGS = [(1, 2, 2)]
MORE_RINGS = [(1, 4, 1), (2, 2, 1)]
RESUMES = [((1, 1, 4), (2, 2, 1)), ((1, 2, 2), (1, 1, 1))]
# Every window full and one document: the only data on which a plain model and a mean over micro-batches are right without the strategy.
PLAIN = {"packing": "document", "last_batch": "drop"}
# Tensor parallelism x Ulysses or ring x hybrid sharding; a checkpoint of it goes on without, and back.
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2, "shard_size": 1}
Results = Callable[[Any], dict[str, Any]]


def size(layout: tuple[int, int, int]) -> int:
    return layout[0] * layout[1] * layout[2]


def slow(layouts: list[Any]) -> list[Any]:
    return [pytest.param(layout, marks=pytest.mark.slow) for layout in layouts]


def all_runs(folder: Path) -> list[tuple[int, dict[Any, dict[str, Any]]]]:
    """Return (world, runs by name): what one call trains. A few each, for a pool's time limit is for a call."""
    stops: dict[Any, dict[str, Any]] = {
        ("stop", n): {"layout": first, "until": STOP, "save": f"{folder}/{n}"} for n, (first, _) in enumerate(RESUMES)
    }
    goes_on: dict[Any, dict[str, Any]] = {
        (first, second): {"layout": second, "resume": f"{folder}/{n}"} for n, (first, second) in enumerate(RESUMES)
    }
    tensor = [
        (4, {"split 4": {"layout": (1, 1, 2), "strategy": TENSOR, "until": STOP, "save": f"{folder}/split"}}),
        (2, {"without": {"layout": (1, 2, 1), "resume": f"{folder}/split", "save": f"{folder}/whole", "until": 15}}),
        (4, {"back": {"layout": (1, 2, 1), "strategy": TENSOR, "resume": f"{folder}/whole"}}),
        (8, {"split 8": {"layout": (2, 2, 1), "strategy": {**TENSOR, "shard_size": 2}}}),
    ]
    return [
        *tensor,
        (4, {**stops, **{key: run for key, run in goes_on.items() if size(key[1]) == 4}}),
        (4, {"document": {"layout": (2, 1, 2), "options": PLAIN}}),
        (4, {"shard 2": {"layout": (2, 1, 2), "strategy": {"shard_size": 2}}}),
        (4, {("balanced", layout): {"layout": layout, "strategy": BALANCED} for layout in RINGS}),
        (4, {layout: {"layout": layout} for layout in MORE}),
        (4, {("balanced", layout): {"layout": layout, "strategy": BALANCED} for layout in MORE_RINGS}),
        *((2, {layout: {"layout": layout}}) for layout in TWO),
        (2, {"stages": {"layout": (1, 1, 2), "strategy": {"ulysses_stages": 2}}}),
        (1, {(1, 1, 1): {"layout": (1, 1, 1)}, "plain": {"layout": None, "options": PLAIN}}),
        (1, {key: run for key, run in goes_on.items() if size(key[1]) == 1}),
    ]


@pytest.fixture(scope="module")
def results(pools: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Train what a test asks for, once."""
    groups = all_runs(tmp_path_factory.mktemp("golden"))
    found: dict[Any, dict[str, Any]] = {}

    def result(name: Any) -> dict[str, Any]:
        if name not in found:
            if name in RESUMES:
                result(("stop", 0))
            [(world, runs)] = [group for group in groups if name in group[1]]
            found.update(zip(runs, pools(world).run(several, list(runs.values()))[0], strict=True))
        return found[name]

    return result


def assert_equal(losses: dict[int, float], expected: list[float], first: int = 0) -> None:
    assert sorted(losses) == list(range(first, NUM_STEPS))
    worst = max(range(first, NUM_STEPS), key=lambda step: abs(losses[step] - expected[step]))
    assert abs(losses[worst] - expected[worst]) <= 1e-8, f"step {worst}: {losses[worst]} against {expected[worst]}"


# Shards of 2 are in every fit of tests/trainer/test_fit.py, stages in tests/rewrite/test_staged_heads.py.
@pytest.mark.parametrize("layout", [(1, 1, 1), *TWO[:2], *slow([TWO[2], *MORE, "shard 2", "stages"])])
def test_a_layout_gives_the_golden_losses(results: Results, layout: Any) -> None:
    assert_equal(results(layout)["losses"], golden())


# In `make test` tests/data/batch/test_balanced_layout.py has balanced fits.
@pytest.mark.parametrize("layout", slow([*RINGS, *MORE_RINGS]))
def test_a_balanced_layout_gives_the_golden_losses(results: Results, layout: Any) -> None:
    assert results(("balanced", layout))["balanced"] >= 4, "too few of the 40 micro-batches were not in zigzag"
    assert_equal(results(("balanced", layout))["losses"], golden())


@pytest.mark.slow
@pytest.mark.parametrize("change", [RESUMES[0], *slow(RESUMES[1:])])
def test_a_resume_on_other_degrees_goes_on_with_the_golden_losses(results: Results, change: Any) -> None:
    stopped = results(("stop", RESUMES.index(change)))["losses"]
    assert sorted(stopped) == list(range(STOP))
    assert_equal({**stopped, **results(change)["losses"]}, golden())
    assert min(results(change)["losses"]) == STOP


@pytest.mark.slow
def test_split_layers_give_the_golden_losses_and_resume_without_and_back(results: Results) -> None:
    parts = [results(name)["losses"] for name in ("split 4", "without", "back")]
    assert [min(each) for each in parts] == [0, STOP, 15]
    assert_equal({step: loss for each in parts for step, loss in each.items()}, golden())
    assert_equal(results("split 8")["losses"], golden())
    assert results("split 8")["initial"] == results((1, 1, 1))["initial"]


@pytest.mark.slow
def test_the_run_crosses_an_epoch_after_the_stop(results: Results) -> None:
    # Lightning counts the epoch in which max_steps ended the loop as done.
    assert results(("stop", 0))["epochs"] == 1
    assert results((1, 1, 1))["epochs"] == 2


@pytest.mark.parametrize("layout", [TWO[0], *slow([*TWO[1:], *MORE, "shard 2", ("stop", 0), ("stop", 1)])])
def test_initial_weights_are_bit_equal(results: Results, layout: Any) -> None:
    made = json.loads((HERE / "losses.json").read_text())["made"]
    assert results(layout)["initial"] == results((1, 1, 1))["initial"] == made["initial_weights_sha256"]


@pytest.mark.slow
def test_plain_lightning_on_one_device_gives_the_same_losses(results: Results) -> None:
    plain = results("plain")
    assert plain["initial"] == results("document")["initial"]
    assert_equal(results("document")["losses"], [plain["losses"][step] for step in range(NUM_STEPS)])
    assert abs(plain["losses"][NUM_STEPS - 1] - golden()[-1]) > 1e-3, "the two data modes must differ"


def test_the_model_learns() -> None:
    losses = golden()
    assert losses[-1] < losses[0] - 2
