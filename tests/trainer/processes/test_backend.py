"""A backend that the user's library registers (SageMaker's "smddp"): its name passes through, and it makes every group."""

import pytest

from lightning_sp.testing import run_ranks
from tests.trainer import scenarios
from tests.trainer.processes import backend_ranks
from tests.trainer.test_fit import same_run


@pytest.mark.slow
def test_a_registered_backend_makes_the_groups(pools):
    case = dict(model="llama", world=2, strategy=dict(ulysses_size=2), data=dict(size=4))
    (expected,), _ = pools(2).run(scenarios.fits, [case])
    for answer in run_ranks(backend_ranks.fit_by, 2, "smddp_like", dict(ulysses_size=2)):
        assert answer["backend"] == "smddp_like"
        assert answer["made"] > 1
        same_run(answer, expected)
