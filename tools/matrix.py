"""Runs the suite under the oldest and the newest versions, an environment each in .venv-matrix/, and prints a table.

    make matrix                  every set
    make matrix ARGS="oldest"    one of them

Owns the sets. Does not own what an environment needs (tools/bootstrap.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools import bootstrap

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-matrix"
COLUMNS = ("torch", "lightning", "transformers")
NOT_RUN = "not run: "


@dataclass(frozen=True)
class VersionSet:
    """One line of the matrix.

    Args:
        name: What the command line calls it.
        python: Interpreter, as major.minor.
        constraints: Versions to install under.
        upgrade: Packages to take to their newest afterwards, past pyproject's limit.
        required: Whether a failure fails the command; False: for information.
    """

    name: str
    python: str
    constraints: str
    upgrade: tuple[str, ...] = ()
    required: bool = True


SETS = (
    VersionSet("oldest", "3.10", "constraints-oldest.txt"),
    VersionSet("newest", "3.13", "constraints-newest.txt"),
    VersionSet("newest-torch", "3.13", "constraints-newest.txt", upgrade=("torch",), required=False),
)


@dataclass(frozen=True)
class Result:
    """What one set gave."""

    version_set: VersionSet
    versions: tuple[str, ...]
    outcome: str
    wall_s: float

    @property
    def failed(self) -> bool:
        """Whether the command fails for it; a set that could not be run has not passed."""
        return self.version_set.required and not self.outcome.startswith("passed")


def candidates(version: str) -> Iterator[str]:
    """Yield commands that may be this Python: the PATH's, then those that version managers keep off it."""
    yield f"python{version}"
    managers = [Path.home() / ".pyenv", Path.home() / ".local/share/uv/python", Path.home() / ".local/share/mise"]
    managers += [Path(folder).parent for folder in os.get_exec_path() if Path(folder).name == "shims"]
    for manager in managers:
        for pattern in (f"*/bin/python{version}", f"versions/*/bin/python{version}"):
            yield from map(str, sorted(manager.glob(pattern)))


def find_python(version: str) -> str | None:
    """Return the first interpreter of that version that runs and can make environments, or None."""
    script = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    return next((name for name in candidates(version) if bootstrap.output_of([name, "-c", script]) == version), None)


def run_set(version_set: VersionSet, pytest_arguments: list[str]) -> Result:
    """Make the set's environment and run the suite in it; the output goes to a log beside it."""
    start_s = time.monotonic()
    print(f"\n== {version_set.name}: Python {version_set.python}, {version_set.constraints}", flush=True)
    python = find_python(version_set.python)
    if python is None:
        outcome = f"{NOT_RUN}no python{version_set.python} with venv was found"
        return Result(version_set, ("-",) * len(COLUMNS), outcome, 0.0)
    venv, log = FOLDER / version_set.name, FOLDER / f"{version_set.name}.log"
    command = [python, "-m", "tools.bootstrap", "--venv", str(venv), "--constraints", version_set.constraints]
    made = subprocess.run([*command, "--same-python"], cwd=ROOT, check=False).returncode == 0
    if made and version_set.upgrade:
        try:
            bootstrap.pip_install(venv, ["--upgrade", *version_set.upgrade], log=log)
        except bootstrap.BootstrapError as error:
            print(error, flush=True)
            made = False
    versions = tuple(bootstrap.installed_version(venv, package) or "-" for package in COLUMNS)
    outcome = run_suite(venv, log, pytest_arguments) if made else f"{NOT_RUN}its environment could not be made"
    return Result(version_set, versions, outcome, time.monotonic() - start_s)


def run_suite(venv: Path, log: Path, pytest_arguments: list[str]) -> str:
    """Run pytest, its output into `log`; return "passed" or "FAILED", pytest's closing line and the log's name."""
    print(f"running the suite; its output: {log}", flush=True)
    # The environment's own commands first: tests start some of them by name.
    environment = os.environ | {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = [str(bootstrap.python_in(venv)), "-m", "pytest", "-m", "not slow", *pytest_arguments]
    with log.open("w") as file:
        status = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    closing = (log.read_text().strip().splitlines() or ["no output"])[-1].strip("= ")
    return f"passed: {closing}" if status == 0 else f"FAILED: {closing} ({log.relative_to(ROOT)})"


def table(results: list[Result]) -> str:
    """Return the results as a Markdown table, ready for docs/LOG.md."""
    lines = [f"| set | Python | {' | '.join(COLUMNS)} | outcome | min |", "|" + "---|" * (len(COLUMNS) + 4)]
    for result in results:
        version_set = result.version_set
        name = version_set.name if version_set.required else f"{version_set.name} (information)"
        cells = (name, version_set.python, *result.versions, result.outcome, f"{result.wall_s / 60:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Run the sets named on the command line, all by default; fail when a required one did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(each.name for each in SETS)}")
    parser.add_argument("--pytest", default="", help='arguments for pytest, e.g. --pytest "tests/data -x"')
    parser.add_argument("--workers", default="1", metavar="N", help="files of tests that run at a time; 1")
    options = parser.parse_args()
    if unknown := set(options.sets) - {each.name for each in SETS}:
        parser.error(f"no such set: {', '.join(sorted(unknown))}; there are {', '.join(each.name for each in SETS)}")
    FOLDER.mkdir(exist_ok=True)
    chosen = [each for each in SETS if not options.sets or each.name in options.sets]
    pytest_arguments = ["-n", options.workers, "--dist", "loadfile", "--no-loadscope-reorder", *options.pytest.split()]
    results = [run_set(each, pytest_arguments) for each in chosen]
    print(f"\n{table(results)}")
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
