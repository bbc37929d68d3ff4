"""The faults of `make faults` can be put back: their old text is where they say."""

from tests.faults.__main__ import FAULTS, ROOT, not_found


def test_each_fault_is_found_once_in_the_sources():
    assert [line for fault in FAULTS for line in not_found(fault, ROOT)] == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 50
