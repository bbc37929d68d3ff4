"""The faults of `make faults` can be put back: their old text is where they say, and so are the tests that must notice."""

import subprocess
import sys
from dataclasses import replace

from tests.faults.__main__ import FAULTS, ROOT, Answers, not_found


def test_each_fault_is_found_once_in_the_sources():
    assert [line for fault in FAULTS for line in not_found(fault, ROOT)] == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 50


def test_each_test_that_must_notice_a_fault_is_there():
    tests = sorted({test for fault in FAULTS for test in fault.tests})
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr


def test_answers_are_kept_by_commit_and_for_the_same_tests(tmp_path):
    fault, other = FAULTS[0], replace(FAULTS[0], tests=("tests/another.py::test",))
    file = tmp_path / "cache" / "faults.json"
    lines = [f"{fault.name} | {test} | ok" for test in fault.tests]
    answers = Answers(file, "first")
    assert answers.of(fault) == []
    answers.add(fault, lines)
    assert Answers(file, "first").of(fault) == lines
    assert Answers(file, "first").of(other) == Answers(file, "second").of(fault) == []
