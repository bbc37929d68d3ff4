"""The faults of `make faults` can be put back: their old text is where they say, and so are the tests that must notice."""

import subprocess
import sys

from tests.faults.__main__ import FAULTS, ROOT, not_found


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
