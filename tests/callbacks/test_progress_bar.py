"""The numbers of the progress bar."""

from lightning_sp.callbacks.progress_bar import short


def test_bar_shows_numbers_at_a_glance():
    assert [short(value) for value in (12345.6, 2.34567, 7, "x")] == ["12,346", "2.35", 7, "x"]
