"""What is measured by what."""

from __future__ import annotations

import pytest

from lightning_sp.preflight.comparison import Difference
from lightning_sp.preflight.explain.verdict import relative_differences


def test_a_loss_of_terms_that_add_up_to_zero_is_measured_by_its_gradients():
    relative = relative_differences({"": Difference(6e-17, 6e-17), "weight": Difference(3e-17, 0.2)})
    assert relative[""] == pytest.approx(6e-17 / 2e-4)
    assert relative_differences({"": Difference(1e-3, 4.0), "weight": Difference(0.0, 0.2)})[""] == 1e-3 / 4.0


def test_a_loss_without_a_gradient_is_measured_by_itself():
    assert relative_differences({"": Difference(1e-3, 1e-3), "weight": Difference(0.0, 0.0)})[""] == 1.0
