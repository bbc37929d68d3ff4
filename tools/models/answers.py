"""What came of each case, kept at once in a file by the package's own version, so that a run goes on where another ended."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

from tools.models.registry import Case

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".cache" / "models.json"
Answer = dict[str, Any]


class Answers:
    """The answers of one version of the package, by the case's name and form.

    Args:
        file: holds {version: {name: answer}}; made where there is none.
        version: answers of another one say nothing of this.
    """

    def __init__(self, file: Path, version: str) -> None:
        self.file, self.version = file, version
        self.every: dict[str, dict[str, Answer]] = {version: {}}
        if file.exists():
            self.every |= json.loads(file.read_text())
        self._lock = Lock()

    def of(self, case: Case, form: str) -> Answer | None:
        """Return an answer, None where it is not known."""
        return self.every[self.version].get(f"{case.name}, {form}")

    def add(self, case: Case, form: str, answer: Answer) -> None:
        """Keep an answer, whichever worker brings it. Who ends this run in the middle of it loses no others."""
        with self._lock:
            self.every[self.version][f"{case.name}, {form}"] = answer
            self.file.parent.mkdir(parents=True, exist_ok=True)
            whole = self.file.with_name(f"{self.file.name}.new")
            whole.write_text(json.dumps(self.every, indent=1) + "\n")
            os.replace(whole, self.file)


def package_version() -> str:
    """Return git's name of the package as committed, with a mark where its files changed since, and transformers' version."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, text=True, capture_output=True, check=True).stdout.strip()

    changed = "+" if git("status", "--porcelain", "lightning_sp") else ""
    package = git("rev-parse", "--short=12", "HEAD:lightning_sp")
    return f"{package}{changed}, transformers {version('transformers')}"
