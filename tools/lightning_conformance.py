"""Lightning's own tests of DDP and of ModelParallelStrategy, run with this package's strategy in their place.

    python -m tools.lightning_conformance --tests PATH               PATH: a checkout of Lightning's tag of the installed version
    python -m tools.lightning_conformance --tests PATH --only swa    tests with that in their names; --fresh forgets earlier answers, --failed
                                                                     those of tests that failed

Tests are chosen by what they say (`ddp`, `DDP`, `ModelParallel`) and do: those that pass here with Lightning's own strategy on CPU ranks, and
make a Trainer with it. Each runs again with all ranks data-parallel, and with all ranks of one sequence. `lightning_conformance_plugin` has what
is replaced, `lightning_conformance_reasons` why a test may fail. A table is printed; answers are kept in
.cache/lightning_conformance.jsonl, so a call that is cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning

from tools.lightning_conformance_plugin import ABOUT, MODES, VARIABLE, is_chosen
from tools.lightning_conformance_reasons import KINDS, kind

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "lightning_conformance.jsonl"
Answers = dict[tuple[str, str], dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tests, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tests", type=Path, required=True, help="a checkout of Lightning, of the installed version's tag"
    )
    parser.add_argument("--only", default="", help="tests with this in their names")
    parser.add_argument(
        "--fresh", action="store_true", help="forget the answers of earlier calls, of the tests that run"
    )
    parser.add_argument("--failed", action="store_true", help="forget those of them that failed with this strategy")
    parser.add_argument("--gpu", action="store_true", help="tests that ask for GPUs too, on as many CPU ranks")
    told = parser.parse_args(arguments)
    folder = told.tests.absolute() / "tests" / "tests_pytorch"
    if not folder.is_dir():
        sys.exit(
            f"--tests {told.tests}: there is no {folder}; give a checkout of github.com/Lightning-AI/pytorch-lightning"
        )
    answers = _cached()
    if told.fresh or told.failed:
        forgets = {key for key, each in answers.items() if told.only in each["name"]}
        if told.failed:
            forgets = {key for key in forgets if key[0] != "plain" and answers[key]["outcome"] == "failed"}
        answers = {key: each for key, each in answers.items() if key not in forgets}
        CACHE.parent.mkdir(exist_ok=True)
        CACHE.write_text("".join(json.dumps(each) + "\n" for each in answers.values()))
    _run(folder, only=told.only, gpu=told.gpu, known=answers)
    print(table(_cached()))


def _run(folder: Path, *, only: str, gpu: bool, known: Answers) -> None:
    """Run the tests that have no answer yet, which goes to the cache."""
    files = sorted(
        str(each.relative_to(folder)) for each in folder.rglob("test_*.py") if ABOUT.search(each.read_text())
    )
    CACHE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="conformance") as scratch:
        paths = [str(ROOT), str(folder.parent)]
        if find_spec("cloudpickle") is None:
            # Imported by many files, used by four tests.
            (Path(scratch) / "cloudpickle.py").write_text("from pickle import *\n")
            paths.append(scratch)
        told = {
            "cache": str(CACHE),
            "scratch": scratch,
            "only": only,
            "gpu": gpu,
            "known": [" ".join(each) for each in known]
            + [f"{mode} {name}" for mode in MODES for name in _not_chosen(known)],
        }
        environment = {
            **os.environ,
            VARIABLE: json.dumps(told),
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder)]
        command += [
            "-p",
            "no:cacheprovider",
            "-p",
            "tools.lightning_conformance_plugin",
            "--continue-on-collection-errors",
            *files,
        ]
        with (Path(scratch) / "said").open("w") as said:
            subprocess.run(command, cwd=folder, env=environment, stdout=said, check=False)


def _not_chosen(answers: Answers) -> list[str]:
    return [name for (mode, name), answer in answers.items() if mode == "plain" and not is_chosen(answer)]


def _cached() -> Answers:
    lines = CACHE.read_text().splitlines() if CACHE.exists() else []
    return {(each["mode"], each["name"]): each for each in map(json.loads, lines)}


def table(answers: Answers) -> str:
    """Return the page: counts, and a row for each test that fails."""
    names = [name for mode, name in answers if mode == "plain"]
    chosen = [
        name for name in names if is_chosen(answers["plain", name]) and all((mode, name) in answers for mode in MODES)
    ]
    plain = [answers["plain", name]["outcome"] for name in names]
    lines = [
        f"lightning {lightning.__version__}: {len(names)} tests speak of these strategies. With Lightning's own {plain.count('passed')} pass on "
        f"the CPU, {plain.count('skipped')} are skipped, {plain.count('failed')} fail. {len(chosen)} of those that pass use one on CPU ranks.",
        "",
        "| ranks | passed | skipped | failed |",
        "|---|---|---|---|",
    ]
    for mode in MODES[1:]:
        outcomes = [answers[mode, name]["outcome"] for name in chosen]
        counts = " | ".join(str(outcomes.count(each)) for each in ("passed", "skipped", "failed"))
        lines.append(f"| {'data-parallel' if mode == 'dp' else 'of one sequence'} | {counts} |")
    lines += ["", "| a test that fails | data-parallel | of one sequence |", "|---|---|---|"]
    failed_in = {
        mode: [kind(answers[mode, name]) for name in chosen if answers[mode, name]["outcome"] == "failed"]
        for mode in MODES[1:]
    }
    lines += [f"| {each} | {' | '.join(str(of.count(each)) for of in failed_in.values())} |" for each in KINDS]
    lines += ["", "| test | ranks | kind | at | why |", "|---|---|---|---|---|"]
    for name in chosen:
        failed = {mode: answers[mode, name] for mode in MODES[1:] if answers[mode, name]["outcome"] == "failed"}
        for mode, answer in failed.items():
            reason = answer.get("reason", "")[:300].replace("|", "\\|")
            lines.append(f"| {name} | {mode} | {kind(answer)} | `{answer.get('statement', '')[:120]}` | {reason} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
