"""The outcome of a case, from the ranks that run it; and worlds of one, two and four ranks that stay alive for it.

A call that fails ends its world, and the next case gets a new one: no case loses another.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_sp.testing import RankPool
from tools.models.batches import WITH_IMAGES, Trial
from tools.models.outcome import worst
from tools.models.ranks import (
    LARGEST_PART,
    LAYOUTS,
    alarm,
    reference,
    seeds_differ,
    sharded,
)
from tools.models.registry import Case

# What the global view says of a query that a mask leaves no key.
NO_KEY = "hide all keys of a query"
# What plain Lightning says of a model that cannot be trained in float64.
IN_FLOAT64 = ("RuntimeError", "plain Lightning leaves weights that are not finite")
PRELOAD = (
    "torch._dynamo",
    "lightning.pytorch",
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "tools.models.ranks",
)
# Runs of one world: what is imported for each type of model stays, some MB of each, in every rank.
MOST_RUNS = 300
# The world of so many ranks.
Pools = Callable[[int], RankPool]


class Worlds:
    """Worlds by size, started on first use; a class because it keeps processes. Use as a context manager.

    Args:
        limit_s: of one training run, the start of its processes aside.
        device: "cpu", or "cuda" for ranks that share a GPU.
    """

    def __init__(self, limit_s: float, device: str = "cpu") -> None:
        self.limit_s, self.device = limit_s, device
        self._started: dict[int, RankPool] = {}
        self._runs: Counter[int] = Counter()

    def __enter__(self) -> Worlds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worlds."""
        for pool in self._started.values():
            pool.close()

    def __call__(self, size: int) -> RankPool:
        """Return the world of so many ranks for a run, a new one after a failure or `MOST_RUNS` runs."""
        is_old = self._runs[size] >= MOST_RUNS
        if size in self._started and (is_old or self._started[size].failure is not None):
            self._started.pop(size).close()
        self._runs[size] += 1
        if size not in self._started:
            self._runs[size] = 1
            self._started[size] = RankPool(
                size, timeout_s=self.limit_s, others_s=min(20.0, self.limit_s), preload=PRELOAD, device=self.device
            )
        return self._started[size]


def answer(pools: Pools, case: Case, form: str, layouts: Sequence[str] = tuple(LAYOUTS)) -> dict[str, Any]:
    """Return the outcome of a case in one form, the worst of all layouts, with what each layout gave."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        file = str(Path(folder) / "reference.pt")
        trial, found = _reference(pools, Trial.of(case, form), file)
        if found["outcome"] != "ran" and str(found["why"]).startswith(IN_FLOAT64):
            # Parts of the model are float32, or overflow in it, whatever it is trained in.
            others = _reference(pools, replace(Trial.of(case, form), wide=True), file)
            trial, found = others if others[1]["outcome"] == "ran" else (trial, found)
        if found["outcome"] == "not finite":
            found = {**found, "outcome": "not compared"}
        if found["outcome"] == "ran":
            with_images = found["num_images"] > 0
            found = _over_layouts(pools, trial, layouts, file)
            if found["outcome"] == "refused" and NO_KEY in found["why"]:
                found = _with_keys(pools, trial.without_left, layouts, file) or found
            if trial.sides != Trial.of(case, form).sides:
                found.setdefault(
                    "why", "without left padding, with which plain Lightning's own weights are not finite in float64"
                )
            if trial.wide:
                found.setdefault(
                    "why", "its own casts to float32 give float64: as it is, plain Lightning cannot in float64"
                )
            if with_images:
                found.setdefault("why", "an image in each row")
    return {**found, "seconds": round(time.monotonic() - started_s, 1)}


def _reference(pools: Pools, trial: Trial, file: str) -> tuple[Trial, dict[str, Any]]:
    """Run plain Lightning; return what it is run on at last, and what came of it: some models take no image, some no left padding."""
    found = answer_of(pools(1), reference, trial, file)
    if found["outcome"] == "not compared" and trial.case.kind in WITH_IMAGES:
        trial = replace(trial, images=False)  # towers that draw float32 themselves take no float64
        found = answer_of(pools(1), reference, trial, file)
    if found["outcome"] == "not finite":
        trial = trial.without_left
        found = answer_of(pools(1), reference, trial, file)
    return trial, found


def _with_keys(pools: Pools, trial: Trial, layouts: Sequence[str], file: str) -> dict[str, Any] | None:
    """Return what comes of a trial whose rows have no padding in front that sees no key; None where it is not exact either."""
    ran = answer_of(pools(1), reference, trial, file)["outcome"] == "ran"
    found = _over_layouts(pools, trial, layouts, file) if ran else {"outcome": ""}
    said = {"why": "without left padding, whose tokens see no key: with it refused"}
    return {**found, **said} if found["outcome"] == "exact" else None


def alarms(
    pools: Pools, case: Case, form: str, precision: str, layouts: Sequence[str] = tuple(LAYOUTS)
) -> dict[str, Any]:
    """Return what of a case is refused, or not, in another precision; "not compared" where plain Lightning does not train it there."""
    trial = Trial.of(case, form)
    for layout in layouts:
        ulysses, ring = LAYOUTS[layout]
        found = answer_of(pools(ulysses * ring), alarm, trial, layout, precision)
        if found["outcome"] != "ran":
            with tempfile.TemporaryDirectory(prefix="models-") as folder:
                file = str(Path(folder) / "reference.pt")
                not_finite = answer_of(pools(1), reference, trial, file)["outcome"] == "not finite"
                if not_finite or (found["outcome"] == "refused" and NO_KEY in found["why"]):
                    # The page has compared it without left padding: padding that has a target sees no key there.
                    trial = trial.without_left
                    found = answer_of(pools(ulysses * ring), alarm, trial, layout, precision)
                alone = answer_of(pools(1), reference, trial, file, 5, precision)
            if alone["outcome"] != "ran":
                return {"outcome": "not compared", "why": alone["why"]}
        if found["outcome"] != "ran":
            return {"outcome": found["outcome"], "why": f"{layout}: {found['why']}"}
    return {"outcome": "ran"}


def _over_layouts(pools: Pools, trial: Trial, layouts: Sequence[str], file: str) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for layout in layouts:
        ulysses, ring = LAYOUTS[layout]
        if min(ulysses, ring) > 1 and found and all(each["outcome"] == "refused" for each in found.values()):
            break  # what both refuse alone is not tried together
        found[layout] = answer_of(pools(ulysses * ring), sharded, trial, layout, file)
    by_layout = {"layouts": {layout: each["outcome"] for layout, each in found.items()}}
    most = worst(found.values())
    if most["outcome"] == "exact":
        said: dict[str, Any] = next((each for each in found.values() if "why" in each), {})
        return {**said, **most, **by_layout}
    if most["outcome"] != "wrong":
        return {**most, **by_layout}
    if answer_of(pools(1), seeds_differ, trial, file)["outcome"] == "random":
        return {"outcome": "not compared", "why": "its own step on one device differs between seeds"}
    # What float32 within the model rounds is a small part of each update, and is gone in float64.
    if trial.wide or any(each.get("part", 0.0) > LARGEST_PART for each in found.values()):
        return {**most, **by_layout}
    wide = replace(trial, wide=True)
    ran = answer_of(pools(1), reference, wide, file)
    if ran["outcome"] != "ran" or (exact := _over_layouts(pools, wide, layouts, file))["outcome"] != "exact":
        return {**most, **by_layout}
    return {
        **exact,
        "why": "exact where its own casts to float32 give float64; as it is, float32 rounds a weight by more",
    }


def answer_of(pool: RankPool, function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Return the worst of what the ranks answer; a crash where one fails or is silent."""
    try:
        return worst(pool.run(function, *args))
    except RuntimeError as error:
        # The last line of a traceback that is not indented names the error; without a traceback the ranks were silent.
        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith((" ", "Traceback"))]
        said = [line for line in lines if not line.startswith(("rank ", "no answer"))] or lines
        return {"outcome": "crash", "why": said[-1] if said else "", "where": str(error)[-4000:]}
