"""Copies of the project, one for each worker: two faults that are in at the same time never meet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from tests.faults.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_sp"
# Beside what begins with a dot, environments among it.
NOT_COPIED = {"build", "dist", "multirun", "outputs", "runs"}
# Bytecode is known by second and size, which a replacement may leave as they were.
ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
Item = TypeVar("Item")


class Copies:
    """Works on several items at a time, each in a copy that it has for itself.

    Args:
        folders: the copies.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders = tuple(folders)
        self._free: SimpleQueue[Path] = SimpleQueue()
        for folder in self.folders:
            self._free.put(folder)

    def each(self, work: Callable[[Item, Path], None], items: Iterable[Item]) -> None:
        """Call `work(item, copy)` for every item; the first that raises is raised here, and no other is begun."""

        def alone(item: Item) -> None:
            copy = self._free.get()
            try:
                work(item, copy)
            finally:
                self._free.put(copy)

        with ThreadPoolExecutor(len(self.folders)) as workers:
            try:
                for done in as_completed([workers.submit(alone, item) for item in items]):
                    done.result()
            except BaseException:
                workers.shutdown(wait=False, cancel_futures=True)
                raise


@contextmanager
def copies(num: int) -> Iterator[Copies]:
    """Copy the project `num` times; the copies go when the context ends."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        yield Copies(
            shutil.copytree(ROOT, Path(folder) / f"copy-{i}", symlinks=True, ignore=not_copied) for i in range(num)
        )


def not_copied(folder: str, names: list[str]) -> set[str]:
    """Return what of a folder the tests do not need."""
    generated = NOT_COPIED if Path(folder) == ROOT else {"__pycache__"}
    return {name for name in names if name.startswith(".") or name in generated}


def not_found(fault: Fault, root: Path) -> list[str]:
    """Return a line for each old text that is not in its file exactly once."""
    counts = [(change, (root / PACKAGE / change.file).read_text().count(change.old)) for change in fault.changes]
    return [f"{fault.name}: {c.file} holds {n} times, not once:\n{c.old}" for c, n in counts if n != 1]


def with_fault(fault: Fault, root: Path) -> dict[Path, str]:
    """Return the files that a fault changes and what they hold with it."""
    files: dict[Path, str] = {}
    for change in fault.changes:
        file = root / PACKAGE / change.file
        files[file] = files.get(file, file.read_text()).replace(change.old, change.new)
    return files


def failed_with(fault: Fault, root: Path) -> list[str]:
    """Put a fault into the copy, run its tests, take it out again; return those that failed."""
    files = with_fault(fault, root)
    before = {file: file.read_text() for file in files}
    for file, text in files.items():
        file.write_text(text)
    failed, _ = failures(root, fault.tests)
    for file, text in before.items():
        file.write_text(text)
    return failed


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
