"""The runs of test_resume.py: those that are not interrupted, those that stop and go on elsewhere, and those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoint import checkpoint_ranks as ranks
from tests.checkpoint.checkpoint_ranks import DP_RING, RING_ULYSSES, ULYSSES_4

Runs = dict[str, dict[str, Any]]


class Results(dict[str, list[Any]]):
    """All runs that end well or are refused, each as the list of its ranks' results: made with its group when one of it is asked for."""

    def __init__(self, pools: Any, groups: list[tuple[int, Runs]]) -> None:
        super().__init__()
        self.pools, self.groups = pools, groups
        self.saved_by = {run["save"]: name for _, runs in groups for name, run in runs.items() if "save" in run}

    def __missing__(self, wanted: str) -> list[Any]:
        [(world, runs)] = [group for group in self.groups if wanted in group[1]]
        for run in runs.values():
            # What an earlier group saves and these go on with.
            if run.get("resume") and self.saved_by[run["resume"]] not in runs:
                self[self.saved_by[run["resume"]]]
        by_rank = self.pools(world).run(ranks.several, list(runs.values()))
        self.update({name: [rank[i] for rank in by_rank] for i, name in enumerate(runs)})
        return self[wanted]


def results_of(pools: Any, folder: Path) -> Results:
    """All runs, of which none has begun."""

    def at(name: str) -> str:
        return str(folder / name)

    def pair(name: str, common: dict[str, Any], first: dict[str, Any] | None = None) -> Runs:
        """A run that is not interrupted and one that stops after a step and goes on."""
        stop = {"max_steps": 1, "save": at(name), **(first or {})}
        return {
            f"{name} whole": common,
            f"{name} stop": {**common, **stop},
            f"{name} resumed": {**common, "resume": at(name)},
        }

    def saved_on_the_way(name: str, common: dict[str, Any]) -> Runs:
        """A run that saves after a step, in the middle, and ends as if it had not; and one that goes on from there."""
        return {
            f"{name} whole": {**common, "save": at(name), "save_after": 1},
            f"{name} resumed": {**common, "resume": at(name)},
        }

    def four(strategy: dict[str, Any] = ULYSSES_4, micro: int = 2, **more: Any) -> dict[str, Any]:
        return {"world": 4, "strategy": strategy, "micro": micro, **more}

    def two(strategy: dict[str, Any] | None = None, micro: int = 2, **more: Any) -> dict[str, Any]:
        return {"world": 2, "strategy": strategy or {"ulysses_size": 2}, "micro": micro, **more}

    def short(**more: Any) -> dict[str, Any]:
        return {
            "world": 2,
            "strategy": {"ulysses_size": 2},
            "micro": 4,
            "max_steps": 2,
            "accumulate_grad_batches": 1,
            **more,
        }

    one_file = {"strategy": {**RING_ULYSSES, "save_distributed_checkpoint": False}}
    # What an optimizer or a precision stores does not depend on the number of ranks.
    in_two: list[Runs] = [
        saved_on_the_way("groups in bf16-true", short(module={"optimizer": "groups"}, precision="bf16-true")),
        saved_on_the_way(
            "momentum", short(module={"optimizer": "momentum"}, max_steps=3, max_epochs=2, precision="bf16-mixed")
        ),
        pair("two", short(module={"optimizer": "two"}, max_steps=4), {"max_steps": 2}),
        {
            "no optimizer": two(size=4, module={"optimizer": "none"}, max_steps=-1, max_epochs=1, save=at("none")),
            "no optimizer resumed": two(
                size=4, module={"optimizer": "none"}, max_steps=-1, max_epochs=2, resume=at("none")
            ),
        },
        {
            **saved_on_the_way("dropout", two({"ring_size": 2}, module={"dropout": 0.2})),
            "dropout elsewhere": two({"data_parallel_size": 2}, 1, module={"dropout": 0.2}, resume=at("dropout")),
        },
    ]
    in_four: list[Runs] = [
        {
            **pair("folder", four(callback=7)),
            "to dp 2 x ring 2": four({**DP_RING, "shard_size": 2}, 1, resume=at("folder"), callback=7),
            "stop of a file": {**four(), **one_file, "max_steps": 1, "save": at("file.ckpt")},
        },
        {"to ring 2 x ulysses 2 from a file": four(RING_ULYSSES, resume=at("file.ckpt"))},
        saved_on_the_way("stream", four(DP_RING, 1, data="stream", max_steps=2)),
    ]
    plain: Runs = {
        "plain whole": {"world": 1, "strategy": {}, "micro": 4, "plain": True, "data": "sequential", "accumulate_grad_batches": 1},
        "plain stop": {"world": 1, "strategy": {}, "micro": 4, "plain": True, "data": "sequential", "accumulate_grad_batches": 1,
                       "max_steps": 2, "save": at("plain.ckpt")},
        "plain within an epoch": {"world": 1, "strategy": {}, "micro": 4, "size": 16, "plain": True, "data": "sequential",
                                  "accumulate_grad_batches": 1, "max_steps": 2, "save": at("within.ckpt")},
    }  # fmt: skip
    in_one: list[Runs] = [
        pair("sgd", {"world": 1, "strategy": {}, "micro": 4, "max_steps": 2, "module": {"optimizer": "sgd"}, "accumulate_grad_batches": 1}),
        {"to one process": {"world": 1, "strategy": {}, "micro": 4, "resume": at("folder"), "accumulate_grad_batches": 1}},
        {"to one process from a file": {"world": 1, "strategy": {}, "micro": 2, "resume": at("file.ckpt")}},
        plain,
    ]  # fmt: skip
    from_plain: Runs = {"from plain Lightning": four(DP_RING, 1, data="sequential", resume=at("plain.ckpt"))}
    # What is refused is refused before the first step, of four ranks' checkpoints too.
    of_others: list[Runs] = [
        {"stream on other degrees": two(data="stream", resume=at("stream"))},
        {
            "weights alone": two(max_steps=1, save=at("weights"), weights_only=True),
            "resume of weights": two(resume=at("weights")),
        },
        {"from within a plain epoch": two(data="sequential", resume=at("within.ckpt"))},
    ]
    of_folder: Runs = {
        "another global batch": two(micro=1, resume=at("folder")),
        "another optimizer": two(module={"optimizer": "sgd"}, resume=at("folder")),
        "other groups": two(module={"optimizer": "groups"}, resume=at("folder")),
        "fewer optimizers": two(module={"optimizer": "none"}, resume=at("folder")),
        "another order": two(data="sequential", resume=at("folder")),
    }
    # A few in one call: a pool's time limit is for a call.
    groups = {1: in_one, 2: [*in_two, *of_others, of_folder], 4: [*in_four, from_plain]}
    return Results(pools, [(world, runs) for world, each in groups.items() for runs in each])
