"""Puts faults that go silently wrong elsewhere back into a copy of the sources, one by one, and asks the tests that must notice.

    python -m tests.faults                 every fault
    python -m tests.faults padding "eval"  those whose name holds one of the words
    python -m tests.faults --resume FILE   what FILE does not know yet of this commit; FILE keeps each fault's answer

The tests run in the copy without a fault first: what fails there shows nothing. A fault whose old text is not found exactly once is refused:
the code has moved, and the fault has to move with it. The last line counts faults and lines.
Owns the running and the table; the faults are in its siblings.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from tests.faults.attention import ATTENTION
from tests.faults.data import DATA
from tests.faults.fault import Fault
from tests.faults.groups import GROUPS
from tests.faults.loss import LOSS
from tests.faults.scores import SCORES

ROOT = Path(__file__).resolve().parents[2]
FAULTS = (*LOSS, *SCORES, *ATTENTION, *DATA, *GROUPS)
PACKAGE = "lightning_sp"
# How the line of a test that noticed ends.
NOTICED = " | ok"
# Beside what begins with a dot, environments among it.
NOT_COPIED = {"build", "dist", "multirun", "outputs", "runs"}
# Bytecode is known by second and size, which a replacement may leave as they were.
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def main(words: Sequence[str], state: Path | None = None) -> int:
    """Run the faults chosen and print their table and its count; return how many were not noticed.

    Args:
        words: a fault is chosen when its name holds one of them; none: every fault.
        state: a file with the answers of runs before, by commit and fault, which this run goes on with.
    """
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    if not chosen:
        raise SystemExit(f"no fault's name holds {' or '.join(words)}; there are: {', '.join(f.name for f in FAULTS)}")
    answers = Answers(state, commit_of(ROOT) if state else "")
    missing = [fault for fault in chosen if not answers.of(fault)]
    if missing:
        run(missing, answers, max(len(fault.name) for fault in chosen))
    lines = [line for fault in chosen for line in answers.of(fault)]
    num_noticed = sum(line.endswith(NOTICED) for line in lines)
    print(f"{len(chosen)} faults, {len(lines)} lines: {num_noticed} noticed, {len(lines) - num_noticed} not noticed")
    if len(missing) < len(chosen):
        print(f"{len(chosen) - len(missing)} faults by {state}, of the same commit:")
        print("\n".join(line for fault in chosen if fault not in missing for line in answers.of(fault)))
    return len(lines) - num_noticed


def run(faults: Sequence[Fault], answers: Answers, width: int) -> None:
    """Put faults into a copy of the project, one by one, and add each one's lines to the answers."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=not_copied)
        moved = [line for fault in faults for line in not_found(fault, copy)]
        if moved:
            raise SystemExit("the code has moved, and these faults with it:\n" + "\n".join(moved))
        for file, tests in by_file(faults).items():
            failed, output = failures(copy, tests)
            if failed:
                raise SystemExit(f"{output}\nwithout a fault these of {file} must pass: {', '.join(failed)}")
        for fault in faults:
            answers.add(fault, noticed(fault, copy, width))


class Answers:
    """The table's lines by fault; with a file, those of runs before are known and new ones are kept at once.

    Args:
        file: holds {commit: {fault: lines}}; made where there is none.
        commit: lines of another commit say nothing of this one.
    """

    def __init__(self, file: Path | None, commit: str) -> None:
        self.file, self.commit = file, commit
        self.every: dict[str, dict[str, list[str]]] = {commit: {}}
        if file is not None and file.exists():
            self.every |= json.loads(file.read_text())

    def of(self, fault: Fault) -> list[str]:
        """Return a fault's lines, none where they are not known for each of its tests."""
        lines = self.every[self.commit].get(fault.name, [])
        return lines if [line.split(" | ")[1] for line in lines] == list(fault.tests) else []

    def add(self, fault: Fault, lines: list[str]) -> None:
        """Keep a fault's lines."""
        self.every[self.commit][fault.name] = lines
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.every, indent=1) + "\n")


def commit_of(root: Path) -> str:
    """Return the commit that is checked out, and refuse changes beside it: their answers would be taken for the commit's."""
    git = partial(subprocess.run, cwd=root, text=True, capture_output=True, check=True)
    if changed := git(["git", "status", "--porcelain"]).stdout:
        raise SystemExit(
            f"--resume keeps answers by commit, and these files differ from it; commit them first:\n{changed}"
        )
    return git(["git", "rev-parse", "HEAD"]).stdout.strip()


def by_file(faults: Iterable[Fault]) -> dict[str, list[str]]:
    """Return the tests of all faults, each once, by their file: so that they meet no others than with a fault."""
    files: dict[str, list[str]] = {}
    for test in sorted({test for fault in faults for test in fault.tests}):
        files.setdefault(test.split("::")[0], []).append(test)
    return files


def not_copied(folder: str, names: list[str]) -> set[str]:
    """Return what of a folder the tests do not need."""
    generated = NOT_COPIED if Path(folder) == ROOT else {"__pycache__"}
    return {name for name in names if name.startswith(".") or name in generated}


def not_found(fault: Fault, root: Path) -> list[str]:
    """Return a line for each old text that is not in its file exactly once."""
    counts = [(change, (root / PACKAGE / change.file).read_text().count(change.old)) for change in fault.changes]
    return [f"{fault.name}: {c.file} holds {n} times, not once:\n{c.old}" for c, n in counts if n != 1]


def noticed(fault: Fault, root: Path, width: int) -> list[str]:
    """Put a fault into the copy, run its tests, take it out again; print and return a line for each test."""
    files = {change.file: root / PACKAGE / change.file for change in fault.changes}
    before = {name: file.read_text() for name, file in files.items()}
    for change in fault.changes:
        files[change.file].write_text(files[change.file].read_text().replace(change.old, change.new))
    failed, _ = failures(root, fault.tests)
    for name, text in before.items():
        files[name].write_text(text)
    lines = [f"{fault.name:{width}} | {test}{NOTICED if test in failed else ' | NOT NOTICED'}" for test in fault.tests]
    print("\n".join(lines), flush=True)
    return lines


def failures(root: Path, tests: Iterable[str]) -> tuple[list[str], str]:
    """Return those of the tests that fail, in their call or in a fixture, and pytest's output."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--tb=short", *tests]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root)}
    run = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, check=False)
    output = run.stdout + run.stderr
    # Passed or failed; a usage error or an import that breaks tells nothing of a test.
    if run.returncode not in (0, 1):
        raise SystemExit(f"{output}\npytest ended with {run.returncode}: {' '.join(tests)}")
    said = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return [test for test in tests if any(line.split(" - ")[0] == test for line in said)], output


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a fault's name; none: every fault")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with what FILE knows of this commit")
    arguments = parser.parse_args()
    sys.exit(main(arguments.names, arguments.resume) > 0)
