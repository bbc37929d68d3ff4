"""Beside AutoSP (DeepSpeed 0.19.8), the compiler that shards sequences: what each takes, how exact it is, what a step costs.

    OMP_NUM_THREADS=1 python -m benchmarks.autosp_peer                 both models, 2 ranks
    OMP_NUM_THREADS=1 python -m benchmarks.autosp_peer --only gpt --repeats 1

Models: Hugging Face's Llama with its labels and positions, and a GPT that counts its positions and shifts its labels inside. Each side is new
processes, the sides in turn in each repeat. The table has the median of a warm step's CPU-seconds, summed over ranks, and of their ratio to
AutoSP's in the same repeat. "Compiling" is what the first two steps took beyond warm ones, in CPU-seconds of all ranks without those of the
compiler's own processes, and in seconds; "another length" likewise for the first step of half the tokens. Caches of Inductor are off. The error
is that of the weights' change by the first step, over the largest element of one process's. AutoSP replicates parameters (ZeRO 1), this project
shards them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.longest_sequence import WITH_MODEL
from benchmarks.peers.environments import DEEPSPEED, DEEPSPEED_ENVIRON, interpreter
from lightning_sp.testing import free_port

ROOT = Path(__file__).resolve().parents[1]
SIZE = {"dim": 512, "layers": 4, "heads": 8, "longest": 4096}
# Steps of a length: the first compiles, the last ones are measured.
_STEPS = 5
_AUTOSP = "AutoSP"
_GLOBAL_VIEW = "this, global view"
# Name -> side, options of the strategy.
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    _AUTOSP: ("autosp", {}),
    "this": ("lightning_sp", {"ulysses_size": 2}),
    _GLOBAL_VIEW: ("lightning_sp", {"ulysses_size": 2, "global_view": True}),
    "this, compile": ("lightning_sp", {"ulysses_size": 2, "compile": True}),
    "this, ring": ("lightning_sp", {"ring_size": 2}),
}


def run(name: str, side: str, model: str, world: int, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each rank of one side answers."""
    python = sys.executable
    environ = {
        **os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }  # fmt: skip
    if name == _AUTOSP:
        environ |= dict(DEEPSPEED_ENVIRON)
        python = interpreter("deepspeed_transformers", (*DEEPSPEED, *WITH_MODEL), dict(DEEPSPEED_ENVIRON))
    command = [python, "-m", "benchmarks.autosp.rank", side, model, json.dumps(given)]
    ranks = [
        subprocess.Popen(command, env={**environ, "RANK": str(r), "LOCAL_RANK": str(r)}, text=True, stdout=subprocess.PIPE, cwd=ROOT)
        for r in range(world)
    ]  # fmt: skip
    answers = [rank.communicate()[0].strip().splitlines() for rank in ranks]
    return [json.loads(lines[-1]) if lines else {"refused": "ended without an answer"} for lines in answers]


def figures(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return of all ranks together: CPU-seconds and bytes of a warm step, what compiling took, the loss of the first step and its error."""
    if refused := next((each["refused"] for each in ranks if "refused" in each), None):
        return {"refused": refused}
    cpu = [sum(each["steps"][i]["cpu_s"] for each in ranks) for i in range(len(ranks[0]["steps"]))]
    wall = [max(each["steps"][i]["wall_s"] for each in ranks) for i in range(len(cpu))]
    warm, half = statistics.median(cpu[2:_STEPS]), statistics.median(cpu[_STEPS + 1 :])
    return {
        "cpu_s": warm,
        "compiling_s": sum(cpu[:2]) - 2 * warm,
        "compiling_wall_s": sum(wall[:2]) - 2 * statistics.median(wall[2:_STEPS]),
        "another_s": cpu[_STEPS] - half,
        "written": statistics.median(sum(each["steps"][i]["written"] for each in ranks) for i in range(2, _STEPS)),
        "loss": ranks[0]["steps"][0]["loss"],
        "error": max(each["error"] for each in ranks),
    }


def table(model: str, loss: float, found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table of a model in Markdown."""
    lines = [
        f"\n{model}: loss of one process {loss:.6f}\n",
        "| side | loss | error of gradients | CPU-s of a warm step | over AutoSP's | compiling, CPU-s | compiling, s | another length, CPU-s "
        "| MB a step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    peer = found.get(_AUTOSP, [])
    for name, repeats in found.items():
        if refused := next((each["refused"] for each in repeats if "refused" in each), None):
            lines.append(f"| {name} | refused: {refused} |" + " |" * 7)
            continue
        of = {key: statistics.median(each[key] for each in repeats) for key in repeats[0]}
        pairs = zip(repeats, peer, strict=True) if peer else ()
        ratios = sorted(a["cpu_s"] / b["cpu_s"] for a, b in pairs if "cpu_s" in b)
        over = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}..{ratios[-1]:.3f})" if ratios else ""
        lines.append(
            f"| {name} | {of['loss']:.6f} | {of['error']:.1e} | {of['cpu_s']:.2f} | {over} "
            f"| {of['compiling_s']:.1f} | {of['compiling_wall_s']:.1f} | {of['another_s']:.1f} | {of['written'] / 1e6:.1f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run both models on all sides, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["llama", "gpt"], choices=["llama", "gpt"])
    parser.add_argument("--sides", nargs="*", default=[*SIDES], choices=[*SIDES], metavar="SIDE", help=", ".join(SIDES))
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    lengths = [options.length] * _STEPS + [options.length // 2] * 3
    with tempfile.TemporaryDirectory() as folder:
        progress = tqdm(total=len(options.only) * options.repeats * len(options.sides))
        for model in options.only:
            given = {"size": SIZE, "lengths": lengths, "options": {}, "reference": f"{folder}/{model}.pt"}
            [alone] = run("one process", "one process", model, 1, given)
            # What counts and shifts inside is seen by the whole sequence alone: the default tries that view by its preflight, which is off here.
            sides = (
                options.sides
                if model == "llama"
                else [each for each in options.sides if each in (_AUTOSP, _GLOBAL_VIEW)]
            )
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
            for _ in range(options.repeats):
                for name in sides:
                    side, strategy = SIDES[name]
                    found[name].append(figures(run(name, side, model, 2, {**given, "options": strategy})))
                    progress.update()
            print(table(model, alone["steps"][0]["loss"], found), flush=True)


if __name__ == "__main__":
    main()
