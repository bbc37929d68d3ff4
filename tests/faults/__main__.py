"""Puts faults that go silently wrong elsewhere back into a copy of the sources, one by one, and asks the tests that must notice.

    python -m tests.faults                 every fault
    python -m tests.faults padding "eval"  those whose name holds one of the words

The tests run in the copy without a fault first: what fails there shows nothing. A fault whose old text is not found exactly once is refused:
the code has moved, and the fault has to move with it. Owns the running and the table; the faults are in its siblings.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
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
# Beside what begins with a dot, environments among it.
NOT_COPIED = {"build", "dist", "multirun", "outputs", "runs"}
# Bytecode is known by second and size, which a replacement may leave as they were.
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def main(words: Sequence[str]) -> int:
    """Run the faults chosen and print their table; return how many were not noticed."""
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    if not chosen:
        raise SystemExit(f"no fault's name holds {' or '.join(words)}; there are: {', '.join(f.name for f in FAULTS)}")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=not_copied)
        moved = [line for fault in chosen for line in not_found(fault, copy)]
        if moved:
            raise SystemExit("the code has moved, and these faults with it:\n" + "\n".join(moved))
        for file, tests in by_file(chosen).items():
            failed, output = failures(copy, tests)
            if failed:
                raise SystemExit(f"{output}\nwithout a fault these of {file} must pass: {', '.join(failed)}")
        width = max(len(fault.name) for fault in chosen)
        return sum(not noticed(fault, copy, width) for fault in chosen)


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


def noticed(fault: Fault, root: Path, width: int) -> bool:
    """Put a fault into the copy, run its tests, take it out again, and print a line for each test."""
    files = {change.file: root / PACKAGE / change.file for change in fault.changes}
    before = {name: file.read_text() for name, file in files.items()}
    for change in fault.changes:
        files[change.file].write_text(files[change.file].read_text().replace(change.old, change.new))
    failed, _ = failures(root, fault.tests)
    for name, text in before.items():
        files[name].write_text(text)
    for test in fault.tests:
        print(f"{fault.name:{width}} | {test} | {'ok' if test in failed else 'NOT NOTICED'}", flush=True)
    return set(failed) == set(fault.tests)


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
    sys.exit(main(parser.parse_args().names) > 0)
