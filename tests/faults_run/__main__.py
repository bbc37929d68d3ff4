"""Writes docs/faults.md: what a user sees of each fault, when, and what is left.

python -m tests.faults_run             those that have no row
python -m tests.faults_run SIGSTOP     one of them anew, and "all" all: 10 minutes on two idle cores
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.faults_run.runs import GOES_ON, Outcome, run
from tests.faults_run.script import NAMES, OPTIONS, SLOW

TARGET = Path(__file__).parents[2] / "docs" / "faults.md"
HEAD = f"""# Faults of one rank

Two ranks train, started by Lightning's launcher with `timeout_s={OPTIONS["timeout_s"]:g}` and `hang_s="auto"`, half of that. In the second
step rank 1 does what the first column says, or rank 0 where it is named. `tests/faults_run/script.py` is the script;
`python -m tests.faults_run` runs it and writes this page, seconds after the fault and all. It was written on two busy
cores, where a process takes seconds to end.

- *named*: the first message of this package that names the rank. A warning at `hang_s` counts, for a rank that may
  come; an error is raised on all ranks that can still speak.
- *ended*: the last process has ended. A process that is stopped ends nothing by itself: the launcher kills those
  that it started. Ranks that torchrun has started again have then trained to the end.
- Ranks that wait in different collectives are ended early unless a thread of yours runs beside: they may wait for that.
  They are then named at `hang_s`, and the run ends at `timeout_s`.
- A rank that is slow in every step is named behind a window of five `hang_s`, here of 10 s; its run goes on.
- *left*: processes that the test had to kill; files in shared memory.

| fault | what the user sees | named, s | ended, s | left |
|---|---|---|---|---|
"""


def said(outcome: Outcome) -> str:
    """Return the first of an outcome's messages without what differs from run to run."""
    line = outcome.named[0][1] if outcome.named else "nothing"
    line = re.sub(r"^(\[rank\d+\]: )?(lightning_sp\.errors\.)?\w+: ", "", line)
    line = re.sub(r"^rank \d+ of 2 on host \S+ has lost another rank: |^rank \d+ ends\. ", "", line).partition(
        ". Every rank takes part"
    )[0]
    if line.endswith("these do not come:"):
        late = outcome.words.partition("these do not come:\n")[2].split("\n")[0].removesuffix(":")
        line = f"{line} {late}"
    line = re.sub(r"process \d+ on [^\s:)]+", "process N on its host", line)
    line = re.sub(r"(\.py):\d+", r"\1", line)
    if GOES_ON in outcome.words:
        line += "; then the ranks, started again, go on from the last checkpoint"
    return re.sub(r", for \d+ s", "", line).replace("|", "\\|")


def row(fault: str, outcome: Outcome) -> str:
    """Return the page's row of a fault."""
    left = [f"{outcome.processes} process, stopped"] * bool(outcome.processes) + outcome.shared_memory
    ended = "goes on" if fault == SLOW else f"{outcome.ended_s:.0f}"
    named = f"{outcome.named[0][0]:.0f}" if outcome.named else "-"
    return f"| {fault} | {said(outcome)} | {named} | {ended} | {', '.join(left) or 'nothing'} |\n"


def rows_of(text: str) -> dict[str, str]:
    """Return a page's rows by their faults."""
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return {line.split("|")[1].strip(): f"{line}\n" for line in lines}


def main(chosen: Sequence[str]) -> None:
    """Run faults, and write the page after each of them."""
    rows = rows_of(TARGET.read_text()) if TARGET.exists() else {}
    for fault in NAMES if "all" in chosen else chosen or [each for each in NAMES if each not in rows]:
        rows[fault] = row(fault, run(fault))
        print(rows[fault], end="", flush=True)
        TARGET.write_text(HEAD + "".join(rows[each] for each in NAMES if each in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
