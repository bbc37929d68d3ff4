"""A part of a classifier that a step calls by itself, the base model or the layer of its head, has the step's own tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rewrite.hugging_face.heads import parts_ranks as ranks

pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", ["base", pytest.param("score", marks=pytest.mark.slow)])
def test_a_part_that_is_called_alone_is_that_of_one_device(pools: Any, kind: str):
    ((logged, weights),) = pools(1).run(ranks.trained, kind, None)
    for found, own in pools(2).run(ranks.trained, kind, dict(ring_size=2)):
        assert found == pytest.approx(logged, rel=1e-10)
        assert max(float((own[name] - weights[name]).abs().max()) for name in weights) <= 1e-10
