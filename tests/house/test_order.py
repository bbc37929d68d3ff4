"""The files of tests that take longest start first."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import LONGEST_FIRST

ROOT = Path(__file__).parents[2]


def test_what_starts_first_is_there():
    assert [file for file in LONGEST_FIRST if not (ROOT / file).is_file()] == []


def test_the_longest_files_come_first_and_the_others_keep_their_order(request):
    files = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in request.session.items))
    first = [file for file in LONGEST_FIRST if file in files]
    assert files[: len(first)] == first
