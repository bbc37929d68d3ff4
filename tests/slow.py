"""Parameters of tests that `make test` leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Return cases as parameters of slow tests: a tuple is several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
