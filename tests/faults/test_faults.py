"""The faults of `make faults` can be put back: their old text is where they say, and so are the tests that must notice."""

import subprocess
import sys
from dataclasses import replace
from time import sleep

import pytest

from tests.faults.__main__ import FAULTS
from tests.faults.answers import Answers
from tests.faults.copies import ROOT, Copies, not_found, with_fault


def test_each_fault_is_found_once_in_the_sources():
    assert [line for fault in FAULTS for line in not_found(fault, ROOT)] == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 50


def test_a_fault_is_no_crash_by_itself(tmp_path):
    """A name that nothing defines would fail every test, and be taken for a fault that was noticed."""
    for i, fault in enumerate(FAULTS):
        for file, text in with_fault(fault, ROOT).items():
            compile(text, f"{file} with {fault.name}", "exec")
            (tmp_path / f"{i}_{file.stem}.py").write_text(text)
    undefined = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821,F822,F823", str(tmp_path)],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert undefined.returncode == 0, undefined.stdout + undefined.stderr


class Collected:
    """What a run of pytest's found, and what it could not read."""

    def __init__(self):
        self.tests, self.failed = set(), []

    def pytest_collection_finish(self, session):
        self.tests |= {item.nodeid for item in session.items}

    def pytest_collectreport(self, report):
        self.failed += [report.nodeid] * report.failed


def test_each_test_that_must_notice_a_fault_is_there_and_not_slow():
    """In this process: what another file of tests has imported already, and torch with it, is not imported again."""
    tests, found = {test for fault in FAULTS for test in fault.tests}, Collected()
    files = sorted({str(ROOT / test.partition("::")[0]) for test in tests})
    arguments = [
        "--collect-only",
        "-q",
        "--rootdir",
        str(ROOT),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not slow",
    ]
    assert (pytest.main([*arguments, *files], plugins=[found]), found.failed) == (0, [])
    assert sorted(tests - found.tests) == []


def test_answers_are_kept_by_commit_and_for_the_same_tests(tmp_path):
    fault, other = FAULTS[0], replace(FAULTS[0], tests=("tests/another.py::test",))
    file = tmp_path / "cache" / "faults.json"
    lines = [f"{fault.name} | {test} | ok" for test in fault.tests]
    answers = Answers(file, "first")
    assert answers.of(fault) == []
    answers.add(fault, lines)
    assert Answers(file, "first").of(fault) == lines
    assert Answers(file, "first").of(other) == Answers(file, "second").of(fault) == []


def test_each_item_is_worked_on_once_and_no_copy_by_two_at_a_time(tmp_path):
    log = []

    def work(item, copy):
        mine = copy / "mine"
        mine.touch(exist_ok=False)
        sleep(0.01)
        log.append((item, copy.name))
        mine.unlink()

    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    Copies(folders).each(work, range(20))
    assert sorted(item for item, _ in log) == list(range(20))
    assert {name for _, name in log} == {"first", "second"}


def test_what_fails_in_a_worker_ends_the_run(tmp_path):
    done = []

    def work(item, copy):
        if item == 1:
            raise SystemExit("without a fault these must pass")
        sleep(0.01)
        done.append(item)

    with pytest.raises(SystemExit, match="without a fault these must pass"):
        Copies([tmp_path / "first", tmp_path / "second"]).each(work, range(50))
    assert len(done) < 10


def test_answers_of_several_workers_are_all_kept(tmp_path):
    file = tmp_path / "faults.json"
    answers = Answers(file, "first")
    Copies([tmp_path] * 4).each(
        lambda fault, _: answers.add(fault, [f"{fault.name} | {t} | ok" for t in fault.tests]), FAULTS
    )
    assert all(Answers(file, "first").of(fault) for fault in FAULTS)
