"""What the tests said of each fault, kept by commit, so that a run goes on where another ended."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from threading import Lock

from tests.faults.fault import Fault


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
        self._lock = Lock()

    def of(self, fault: Fault) -> list[str]:
        """Return a fault's lines, none where they are not known for each of its tests."""
        lines = self.every[self.commit].get(fault.name, [])
        return lines if [line.split(" | ")[1] for line in lines] == list(fault.tests) else []

    def add(self, fault: Fault, lines: list[str]) -> None:
        """Keep a fault's lines, whichever worker brings them. Who ends this run in the middle of it loses no others."""
        with self._lock:
            self.every[self.commit][fault.name] = lines
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                whole = self.file.with_name(f"{self.file.name}.new")
                whole.write_text(json.dumps(self.every, indent=1) + "\n")
                os.replace(whole, self.file)


def commit_of(root: Path) -> str:
    """Return the commit that is checked out, and refuse changes beside it: their answers would be taken for the commit's."""
    git = partial(subprocess.run, cwd=root, text=True, capture_output=True, check=True)
    if changed := git(["git", "status", "--porcelain"]).stdout:
        raise SystemExit(
            f"--resume keeps answers by commit, and these files differ from it; commit them first:\n{changed}"
        )
    return git(["git", "rev-parse", "HEAD"]).stdout.strip()
