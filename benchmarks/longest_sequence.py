"""The longest sequence that trains in a given memory per rank: plain FSDP2, this project's switches, and others, each as published.

    python -m benchmarks.longest_sequence                                2 ranks, 3 and 5 GiB, a vocabulary of 32,000
    python -m benchmarks.longest_sequence --world 4 --budgets 2 3
    python -m benchmarks.longest_sequence --vocabulary 128000            the head is the embedding
    python -m benchmarks.longest_sequence --only "plain FSDP2" selective full
    python -m benchmarks.longest_sequence --confirm "plain FSDP2"        one real step at 90% of what is predicted

The model is an unmodified Hugging Face Llama (8 layers, dim 512, float32) with AdamW. What a rank needs is what stays (parameters, optimizer)
and what a step adds at its peak, above the process with its libraries; both by the kernel's count of resident pages. It is measured at three
lengths, in three parts of a step that have a peak each: the blocks, the loss between their forward and backward, and the rest (the embedding,
the optimizer). Which part is the peak changes with the length, so each has a line of its own; the longest sequence is what all of them hold. The
defaults, whose policies follow the budget, say themselves how long a sequence it holds, by what they predict. Processes are new for each
contestant. One with a Trainer counts, beyond the others, what Lightning loads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import DEEPSPEED, DEEPSPEED_ENVIRON, TORCH, interpreter
from lightning_sp.testing import free_port

ROOT = Path(__file__).resolve().parents[1]
GIB, MIB = 2**30, 2**20
# A ratio to what trains hardly anything says nothing.
LEAST_PLAIN = 1024
WITH_MODEL = (("transformers==5.24.0",),)


@dataclass(frozen=True)
class Contestant:
    """Who trains.

    Args:
        name: in the table.
        module: in benchmarks/longest/contestants/.
        variant: what the module is told.
        lengths: of the first measurement on two ranks, whole sequences.
        packages: of its environment, each a pip command's arguments; empty for this one.
        environ: of its processes.
        environment: the folder of its environment.
        budgeted: it is given the budget, and says itself how long a sequence that holds: no line is drawn.
        least_world: ranks that it needs.
    """

    name: str
    module: str
    variant: str = ""
    lengths: tuple[int, ...] = (2048, 4096, 8192)
    packages: tuple[tuple[str, ...], ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    environment: str = ""
    budgeted: bool = False
    least_world: int = 1


def ours(name: str, lengths: tuple[int, ...] = (2048, 4096, 8192), **options: Any) -> Contestant:
    """Return this project with options of its strategy."""
    return Contestant(name, "lightning_sp", json.dumps(options), lengths)


PARTS = ("blocks", "loss", "rest")
SHORT, LONG = (512, 1024, 2048), (4096, 8192, 16384)
# At fewer tokens the line of tiled blocks is flatter.
TILED = (8192, 12288, 16384)
EVERY_SWITCH: dict[str, Any] = dict(
    activation_checkpointing="full", mlp_tile_tokens="auto", activation_offload="disk", activation_loading_horizon=2,
    ulysses_stages=8, stage_inputs="recomputed",
)  # fmt: skip
CONTESTANTS = (
    Contestant("plain FSDP2", "fsdp2", "", SHORT),
    Contestant("FSDP2, checkpointing", "fsdp2", "checkpoint", (1024, 2048, 4096)),
    Contestant("FSDP2, checkpointing, chunked loss", "fsdp2", "checkpoint, chunked loss", LONG),
    Contestant("Ulysses by hand, checkpointing", "hand_ulysses"),
    Contestant("ALST (DeepSpeed 0.19.8)", "alst", "", LONG, (*DEEPSPEED, *WITH_MODEL), DEEPSPEED_ENVIRON, "deepspeed_transformers"),
    Contestant("AutoSP (DeepSpeed 0.19.8)", "autosp", "", LONG, (*DEEPSPEED, *WITH_MODEL), DEEPSPEED_ENVIRON, "deepspeed_transformers"),
    Contestant(
        "ringmaster, checkpointing", "ringmaster_ulysses", "", (2048, 4096, 8192),
        ((TORCH, "numpy", "transformers==5.24.0"), ("--no-deps", "axolotl-ringmaster==0.2.7")), (), "ringmaster_attention",
    ),
    replace(ours("the defaults, given the budget"), budgeted=True),
    ours("nothing recomputed, logits", SHORT, activation_checkpointing="none", loss_chunk_tokens=None),
    ours("nothing recomputed", activation_checkpointing="none"),
    ours("selective", activation_checkpointing="selective"),
    ours("full", activation_checkpointing="full"),
    ours("stages made again, full", LONG, activation_checkpointing="full", ulysses_stages=8, stage_inputs="recomputed"),
    ours("full, tiled MLPs", TILED, activation_checkpointing="full", mlp_tile_tokens="auto"),
    ours(
        "full, tiled MLPs, inputs on disk", TILED, activation_checkpointing="full", mlp_tile_tokens="auto", activation_offload="disk",
        activation_loading_horizon=2,
    ),
    ours("stages made again, full, tiled MLPs, inputs on disk", TILED, **EVERY_SWITCH),
    # A stage has a head of all tokens of a Ulysses group: beside a ring of 2 of half as many.
    replace(ours("and a ring of 2 beside Ulysses", TILED, **EVERY_SWITCH, ring_size=2), least_world=4),
    replace(ours("and a ring in place of Ulysses", TILED, **EVERY_SWITCH, ulysses_size=1), least_world=2),
)  # fmt: skip


def measure(
    contestant: Contestant, world: int, vocabulary: int, lengths: tuple[int, ...], budget: float
) -> list[dict[str, Any]]:
    """Return what the largest rank needs at each length, in bytes: stays, step, of its parts what they need with what stays; the loss, seconds.

    Args:
        contestant: who trains.
        world: ranks.
        vocabulary: of the model.
        lengths: whole sequences.
        budget: GiB of a rank, for one that is given it.

    Raises:
        RuntimeError: a rank ended without an answer.
    """
    environ = {
        **os.environ, **dict(contestant.environ), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    python = interpreter(contestant.environment, contestant.packages, dict(contestant.environ))
    problem = json.dumps({"vocab_size": vocabulary, "lengths": lengths})
    variant = json.dumps({"memory_budget_gib": budget}) if contestant.budgeted else contestant.variant
    command = [python, "-m", "benchmarks.longest.rank", contestant.module, variant, problem]
    ranks = [
        subprocess.Popen(command, env={**environ, "RANK": str(r), "LOCAL_RANK": str(r)}, text=True, stdout=subprocess.PIPE, cwd=ROOT)
        for r in range(world)
    ]  # fmt: skip
    answers = [rank.communicate()[0].strip().splitlines() for rank in ranks]
    if not all(answers):
        raise RuntimeError(f"{contestant.name} ended without an answer; what it said is above")
    of_ranks = [json.loads(lines[-1]) for lines in answers]
    return [_of_largest(at) for at in zip(*of_ranks, strict=True)]


def _of_largest(ranks: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    most = max(ranks, key=lambda each: each["stays"] + each["step"])
    return {**most, "parts": {part: max(each["parts"][part] for each in ranks) for part in most["parts"]}}


@dataclass(frozen=True)
class Line:
    """What a part of a step needs at its peak, what stays included: bytes at no token, and bytes for each token of the sequence.

    Args:
        off: bytes by which the measured length farthest from the line is off it.
        rise: bytes by which the line rises over the measured lengths.
    """

    constant: float
    per_token: float
    off: float
    rise: float

    def check(self, part: str) -> None:
        """Refuse a line that its points do not make: the kernel takes pages from a process where memory is short, and what is left is no need.

        Raises:
            RuntimeError: a point is off it by more than a tenth of its rise.
        """
        if self.off > self.rise / 10:
            raise RuntimeError(
                f"its {part} are up to {self.off / MIB:.1f} MiB off a line that rises by {self.rise / MIB:.1f} MiB: measure it with nothing "
                "beside it, or at longer sequences"
            )

    def __str__(self) -> str:
        return f"{self.constant / MIB:.0f} + {self.per_token / 1024:.2f}"

    def longest(self, budget: float) -> float:
        """Return how many tokens a budget in bytes holds; infinity where the part does not grow with them."""
        if self.constant >= budget:
            return 0.0
        return (budget - self.constant) / self.per_token if self.per_token > 0 else float("inf")


def lines(measured: list[dict[str, Any]]) -> dict[str, Line]:
    """Return the line of each part, by least squares."""
    return {part: _line([(at["length"], at["parts"][part]) for at in measured]) for part in measured[0]["parts"]}


def _longest(of_parts: dict[str, Line], budget: float) -> int:
    """Return how many tokens a budget in bytes holds.

    Raises:
        RuntimeError: the part that is the first to have too little is no line.
    """
    part = min(of_parts, key=lambda each: of_parts[each].longest(budget))
    of_parts[part].check(part)
    return int(of_parts[part].longest(budget))


def _line(points: list[tuple[float, float]]) -> Line:
    mean_x, mean_y = (sum(of_points) / len(points) for of_points in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    constant = mean_y - slope * mean_x
    span = max(x for x, _ in points) - min(x for x, _ in points)
    return Line(constant, slope, max(abs(y - constant - slope * x) for x, y in points), slope * span)


def table(chosen: list[Contestant], world: int, vocabulary: int, budgets: list[float], confirmed: list[str]) -> None:
    """Print a row for each contestant, and what does not run."""
    print(f"{world} ranks, vocabulary {vocabulary}: what stays, and the longest sequence (over plain FSDP2's)")
    heads = [f"{budget:g} GiB" for budget in budgets]
    print("MiB at no token + KiB for each token of the sequence, of the parts of a step that have a peak of their own")
    print("| | stays, MiB | blocks | loss | rest | " + " | ".join(heads) + " | loss |")
    print("| --- |" + " --- |" * (5 + len(budgets)))
    plain: list[int] = []
    for each in chosen:
        lengths = tuple(length * world // 2 for length in each.lengths)
        try:
            of_budgets = [
                measure(each, world, vocabulary, lengths, budget)
                for budget in budgets[: len(budgets) if each.budgeted else 1]
            ]
        except RuntimeError as error:
            print(f"left out: {error}", flush=True)
            continue
        measured = of_budgets[0]
        of_parts = {} if each.budgeted else lines(measured)
        if each.budgeted:
            found = [int(of_budget[-1]["longest"]) * world for of_budget in of_budgets]
        else:
            try:
                found = [_longest(of_parts, budget * GIB) for budget in budgets]
            except RuntimeError as error:
                print(f"left out: {each.name}: {error}", flush=True)
                continue
        shown = " | ".join(str(of_parts.get(part, "-")) for part in PARTS)
        plain = plain or (found if each.name == CONTESTANTS[0].name else [])
        cells = []
        for number, tokens in enumerate(found):
            over = f" ({tokens / plain[number]:.1f}x)" if plain and plain[number] >= LEAST_PLAIN else ""
            cells.append(f"{tokens:,}{over}")
        stays, loss = max(at["stays"] for at in measured), measured[0]["loss"]
        print(f"| {each.name} | {stays / MIB:.0f} | {shown} | {' | '.join(cells)} | {loss:.6f} |", flush=True)
        if each.name in confirmed:
            confirm(each, world, vocabulary, found[0], budgets[0])


def confirm(contestant: Contestant, world: int, vocabulary: int, tokens: int, budget: float) -> None:
    """Print what one step at 90% of a predicted length really takes."""
    unit = 64 * world
    length = int(0.9 * tokens) // unit * unit
    # One that chooses by what it has measured has a short step before it.
    before = (contestant.lengths[0] * world // 2,) if contestant.budgeted else ()
    found = measure(contestant, world, vocabulary, (*before, length), budget)[-1]
    needed = (found["stays"] + found["step"]) / GIB
    print(
        f"confirmed: {contestant.name} trained {length:,} tokens, 90% of {tokens:,}, in {needed:.2f} of {budget:g} GiB, {found['seconds']:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--budgets", type=float, nargs="+", default=[3.0, 5.0], metavar="GIB")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names that begin so")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS", help="whole sequences that are measured")
    parser.add_argument("--confirm", nargs="+", default=[], metavar="NAME", help="at the first budget")
    given = parser.parse_args()
    enough = [each for each in CONTESTANTS if each.least_world <= given.world]
    chosen = [each for each in enough if each.name.startswith(tuple(given.only or [""]))]
    if given.lengths:
        chosen = [
            replace(each, lengths=tuple(length * 2 // given.world for length in given.lengths)) for each in chosen
        ]
    if not chosen:
        raise SystemExit(f"no contestant is called {given.only}: {', '.join(each.name for each in enough)}")
    table(chosen, given.world, given.vocabulary, given.budgets, given.confirm)


if __name__ == "__main__":
    sys.exit(main())
