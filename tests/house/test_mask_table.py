"""docs/masks.md says what the tests run."""

from __future__ import annotations

from tests.attention.ranks.attention_ranks import Case
from tests.attention.ranks.test_law import CASES
from tests.drawn_cases import masks
from tests.mask_table import DOCUMENT, ROWS, table


def test_the_document_is_current():
    assert DOCUMENT.read_text() == table(), "run: python -m tests.mask_table"


def test_every_row_is_a_case_of_the_law():
    named = {**masks.NAMED, **masks.CROSS}
    cases = [(named[name], more) for _, name, more in CASES]
    for name, row in ROWS.items():
        assert any(row.mask.items() <= mask.items() and row.options == more for mask, more in cases), name


def test_the_changes_are_those_of_the_attention():
    for name, row in ROWS.items():
        case = Case(heads=6, kv_heads=2, length=32, mask=row.mask, **row.options)
        _, options = case.options()
        found = [key for key in ("softcap", "bias", "score_mod", "dropout") if options[key] is not None]
        found += ["dense mask"] * ("dense" in row.mask) + ["mask_mod"] * ("mask_mod" in row.mask)
        assert tuple(found) == row.changes, name
