"""Lightning's own tests of DDP and of ModelParallelStrategy, run with this package's strategy in their place.

    python -m tools.lightning_conformance --tests PATH               PATH: a checkout of Lightning's tag of the installed version
    python -m tools.lightning_conformance --tests PATH --only swa    tests with that in their names; --fresh forgets earlier answers

Tests are chosen by what they say (`ddp`, `DDP`, `ModelParallel`) and do: those that pass here with Lightning's own strategy on CPU ranks, and
make a Trainer with it. Each runs again with all ranks data-parallel, and with all ranks of one sequence. `lightning_conformance_plugin` has what
is replaced. A table is printed; answers are kept in .cache/lightning_conformance.jsonl, so a call that is cut off goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning
from tqdm import tqdm

from tools.lightning_conformance_plugin import ABOUT, VARIABLE

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "lightning_conformance.jsonl"
LIMIT_S = 180.0
MODES = ("dp", "sp")
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
    parser.add_argument("--gpu", action="store_true", help="tests that ask for GPUs too, on as many CPU ranks")
    told = parser.parse_args(arguments)
    folder = told.tests.absolute() / "tests" / "tests_pytorch"
    if not folder.is_dir():
        sys.exit(
            f"--tests {told.tests}: there is no {folder}; give a checkout of github.com/Lightning-AI/pytorch-lightning"
        )
    found = [each for each in _collected(folder) if told.only in each["test"] and (told.gpu or not each["gpu"])]
    answers = _cached({each["test"] for each in found} if told.fresh else set())
    _run_all(
        folder,
        [each for each in found if ("plain", each["test"]) not in answers],
        "plain",
        answers,
        lambda each: each["alone"],
    )
    chosen = [each for each in found if _is_chosen(answers.get(("plain", each["test"])))]
    for mode in MODES:
        due = [each for each in chosen if (mode, each["test"]) not in answers]
        _run_all(
            folder,
            due,
            mode,
            answers,
            lambda each: each["alone"] or "launched" in answers["plain", each["test"]]["made"],
        )
    print(table([each["test"] for each in found], answers))


def _is_chosen(plain: dict[str, Any] | None) -> bool:
    """Whether a test passes with Lightning's own strategy, and uses it."""
    return plain is not None and plain["outcome"] == "passed" and bool(set(plain["made"]) - {"launched"})


def _collected(folder: Path) -> list[dict[str, Any]]:
    files = sorted(each for each in folder.rglob("test_*.py") if ABOUT.search(each.read_text()))
    with tempfile.TemporaryDirectory() as scratch:
        answers = Path(scratch) / "answers"
        _pytest(
            folder, [str(each.relative_to(folder)) for each in files], "plain", answers, Path(scratch), collect=True
        )
        return _lines(answers)


def _pytest(
    folder: Path, tests: Sequence[str], mode: str, answers: Path, scratch: Path, *, collect: bool = False
) -> tuple[int | None, str]:
    """Run tests in one process; return its code, None where it took too long, and the last of what it said."""
    told = json.dumps({"mode": mode, "answers": str(answers), "scratch": str(scratch)})
    paths = [str(ROOT), str(folder.parent)]
    if find_spec("cloudpickle") is None:
        (scratch / "cloudpickle.py").write_text("from pickle import *\n")  # imported by many files, used by four tests
        paths.append(str(scratch))
    environment = {**os.environ, VARIABLE: told, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        "-p",
        "no:cacheprovider",
    ]
    command += ["-p", "tools.lightning_conformance_plugin", "--timeout", str(LIMIT_S), *tests]
    command += ["--collect-only", "--continue-on-collection-errors"] if collect else []
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code: int | None = process.wait(None if collect else LIMIT_S * len(tests))
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks of the session that are left
        process.wait()
        said.seek(0)
        return code, said.read()[-3000:]


def _run_all(folder: Path, found: Sequence[dict[str, Any]], mode: str, answers: Answers, is_alone: Any) -> None:
    """Run tests, those that start ranks each in a process of its own, and keep what became of them."""
    groups: dict[str, list[str]] = {}
    for each in found:
        name = each["test"]
        groups.setdefault(name if is_alone(each) else name.split("::")[0], []).append(name)
    for names in tqdm(list(groups.values()), desc=mode):
        with tempfile.TemporaryDirectory(prefix="conformance") as scratch:
            file = Path(scratch) / "answers"
            code, said = _pytest(folder, names, mode, file, Path(scratch))
            notes = _lines(file)
        for name in names:
            answers[mode, name] = _outcome([each for each in notes if each["test"] == name], code, said)
            CACHE.parent.mkdir(exist_ok=True)
            with CACHE.open("a") as stream:
                stream.write(json.dumps({"mode": mode, "name": name, **answers[mode, name]}) + "\n")


def _outcome(notes: Sequence[dict[str, Any]], code: int | None, said: str) -> dict[str, Any]:
    """Return what became of a test on all its ranks: the first failure, if any."""
    made = sorted({name for each in notes for name in each["made"]})
    worst = [each for each in notes if each["outcome"] == "failed"] or [each for each in notes if each["rank"] == 0]
    if not worst:
        reason = "it takes too long" if code is None else f"no answer, code {code}: {' '.join(said.split())[-400:]}"
        return {"outcome": "failed", "made": made, "reason": reason}
    return {**worst[0], "made": made}


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _cached(forgotten: Iterable[str]) -> Answers:
    return {(each["mode"], each["name"]): each for each in _lines(CACHE) if each["name"] not in set(forgotten)}


def table(names: Sequence[str], answers: Answers) -> str:
    """Return the page: counts, and a row for each test that fails."""
    chosen = [name for name in names if _is_chosen(answers.get(("plain", name)))]
    plain = [answers["plain", name]["outcome"] for name in names if ("plain", name) in answers]
    lines = [
        f"lightning {lightning.__version__}: {len(names)} tests speak of these strategies. With Lightning's own {plain.count('passed')} pass on "
        f"the CPU, {plain.count('skipped')} are skipped, {plain.count('failed')} fail. {len(chosen)} of those that pass use one on CPU ranks.",
        "",
        "| ranks | passed | skipped | failed |",
        "|---|---|---|---|",
    ]
    for mode in MODES:
        outcomes = [answers[mode, name]["outcome"] for name in chosen]
        counts = " | ".join(str(outcomes.count(each)) for each in ("passed", "skipped", "failed"))
        lines.append(f"| {'data-parallel' if mode == 'dp' else 'of one sequence'} | {counts} |")
    lines += ["", "| test | ranks | at | why |", "|---|---|---|---|"]
    for name in chosen:
        failed = {mode: answers[mode, name] for mode in MODES if answers[mode, name]["outcome"] == "failed"}
        for mode, answer in failed.items():
            reason = answer.get("reason", "")[:300].replace("|", "\\|")
            lines.append(f"| {name} | {mode} | `{answer.get('statement', '')[:120]}` | {reason} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
