"""Puts faults that go silently wrong elsewhere back into copies of the sources, and asks the tests that must notice.

    python -m tests.faults                 every fault
    python -m tests.faults padding "eval"  those whose name holds one of the words
    python -m tests.faults --resume FILE   what FILE does not know yet of this commit; FILE keeps each fault's answer
    python -m tests.faults --workers 2     so many faults at a time, each in a copy of its own

The tests run in a copy without a fault first: what fails there shows nothing. A fault whose old text is not found exactly once is refused:
the code has moved, and the fault has to move with it. The last line counts faults and lines.
Owns the table; the faults, the copies and the answers are in its siblings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.faults.answers import Answers, commit_of
from tests.faults.copies import ROOT, copies, failed_with, failures, not_found
from tests.faults.fault import Fault
from tests.faults.planted.attention import ATTENTION
from tests.faults.planted.checkpoints import CHECKPOINTS
from tests.faults.planted.data import DATA
from tests.faults.planted.global_view import GLOBAL_VIEW
from tests.faults.planted.groups import GROUPS
from tests.faults.planted.hangs import HANGS
from tests.faults.planted.loss import LOSS
from tests.faults.planted.memory import MEMORY
from tests.faults.planted.preflight import PREFLIGHT
from tests.faults.planted.recomputed_state import RECOMPUTED_STATE
from tests.faults.planted.reductions import REDUCTIONS
from tests.faults.planted.scores import SCORES
from tests.faults.planted.tensor_parallel import TENSOR_PARALLEL
from tests.faults.planted.users import USERS

FAULTS = (
    *LOSS, *REDUCTIONS, *SCORES, *ATTENTION, *CHECKPOINTS, *DATA, *GROUPS, *GLOBAL_VIEW, *HANGS, *MEMORY, *RECOMPUTED_STATE, *USERS, *PREFLIGHT,
    *TENSOR_PARALLEL,
)  # fmt: skip
# How the line of a test that noticed ends.
NOTICED = " | ok"


def main(words: Sequence[str], state: Path | None = None, num_workers: int = 1) -> int:
    """Run the faults chosen and print their table and its count; return how many were not noticed.

    Args:
        words: a fault is chosen when its name holds one of them; none: every fault.
        state: a file with the answers of runs before, by commit and fault, which this run goes on with.
        num_workers: how many faults are in at a time.
    """
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    if not chosen:
        raise SystemExit(f"no fault's name holds {' or '.join(words)}; there are: {', '.join(f.name for f in FAULTS)}")
    answers = Answers(state, commit_of(ROOT) if state else "")
    missing = [fault for fault in chosen if not answers.of(fault)]
    if missing:
        run(missing, answers, width=max(len(fault.name) for fault in chosen), num_workers=num_workers)
    lines = [line for fault in chosen for line in answers.of(fault)]
    num_noticed = sum(line.endswith(NOTICED) for line in lines)
    print(f"{len(chosen)} faults, {len(lines)} lines: {num_noticed} noticed, {len(lines) - num_noticed} not noticed")
    if len(missing) < len(chosen):
        print(f"{len(chosen) - len(missing)} faults by {state}, of the same commit:")
        print("\n".join(line for fault in chosen if fault not in missing for line in answers.of(fault)))
    return len(lines) - num_noticed


def run(faults: Sequence[Fault], answers: Answers, *, width: int, num_workers: int) -> None:
    """Put faults into copies of the project, one by one in each, and add each one's lines to the answers."""
    if moved := [line for fault in faults for line in not_found(fault, ROOT)]:
        raise SystemExit("the code has moved, and these faults with it:\n" + "\n".join(moved))

    def without(tests: list[str], copy: Path) -> None:
        failed, output = failures(copy, tests)
        if failed:
            raise SystemExit(f"{output}\nwithout a fault these must pass: {', '.join(failed)}")

    def within(fault: Fault, copy: Path) -> None:
        failed = failed_with(fault, copy)
        said = {test: NOTICED if test in failed else " | NOT NOTICED" for test in fault.tests}
        lines = [f"{fault.name:{width}} | {test}{answer}" for test, answer in said.items()]
        answers.add(fault, lines)
        # At once and to its end, so that the lines of two workers do not mix.
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()

    with copies(min(num_workers, len(faults))) as several:
        several.each(without, by_file(faults))
        several.each(within, faults)


def by_file(faults: Iterable[Fault]) -> list[list[str]]:
    """Return the tests of all faults, each once, by their file: so that they meet no others than with a fault."""
    files: dict[str, list[str]] = {}
    for test in sorted({test for fault in faults for test in fault.tests}):
        files.setdefault(test.split("::")[0], []).append(test)
    return list(files.values())


def at_least_one(text: str) -> int:
    """Return a number of workers."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} workers do nothing; give 1 or more")
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a fault's name; none: every fault")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with what FILE knows of this commit")
    parser.add_argument("--workers", type=at_least_one, default=1, metavar="N", help="faults at a time; 1")
    arguments = parser.parse_args()
    sys.exit(main(arguments.names, arguments.resume, arguments.workers) > 0)
