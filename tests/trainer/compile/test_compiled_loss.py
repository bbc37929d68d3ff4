"""A loss that a compiled model makes by `nn.CrossEntropyLoss()`: Dynamo puts torch's function into the graph."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_sp.testing import max_error
from tests.trainer.compile import compiled_loss_ranks as ranks

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize("head", ["SequenceClassification", "MaskedLM"])
def test_a_graph_that_calls_the_function_is_exact(pools: Any, head: str):
    (one,) = pools(1).run(ranks.trained, head, None, "")
    for found in pools(2).run(ranks.trained, head, dict(ring_size=2), "eager"):
        assert not found["error"]
        assert found["loss"] == pytest.approx(one["loss"], rel=1e-10)
        assert max(max_error(found["weights"][name], weight) for name, weight in one["weights"].items()) < 1e-10


GROUPS = pytest.param(dict(data_parallel_size=2, sequence_parallel_size=1), marks=pytest.mark.slow)


@pytest.mark.parametrize("strategy", [pytest.param(dict(ring_size=2), marks=pytest.mark.slow), GROUPS], ids=str)
def test_a_graph_that_holds_it_is_refused_on_all_ranks(pools: Any, strategy: dict[str, int]):
    for found in pools(2).run(ranks.trained, "MaskedLM", strategy, "aot_eager"):
        assert found["error"].startswith(
            "F.cross_entropy of a module made inside of compiled code (nn.CrossEntropyLoss()"
        )
        assert "compute the loss outside" in found["error"]
