"""The soak's verdict: memory, files and threads that grow are named."""

from __future__ import annotations

import pytest

from tools import soak
from tools.soak import Found

MIB = 2**20


def test_what_grows_is_named():
    flat = [Found(100, 300 * MIB, 20, 8), Found(500, 350 * MIB, 25, 9), Found(2000, 353 * MIB, 25, 9)]
    assert soak.verdict(flat, 500) == []
    grown = [*flat, Found(2100, 354 * MIB, 26, 10)]
    memory, files, threads = soak.verdict(grown, 500)
    assert memory == "memory grew by 1.1% from step 500 on (1% allowed)"
    assert (files, threads) == ("26 files, 25 at step 500", "10 threads, 9 at step 500")


def test_a_number_of_steps_that_fits_no_plan_is_refused(capsys):
    with pytest.raises(SystemExit):
        soak.main(["--steps", "90"])
    assert "multiple of 20" in capsys.readouterr().err
