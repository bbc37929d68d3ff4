"""LayerDrop: all ranks skip the same layers, and train."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rewrite.hugging_face import layer_drop_ranks as ranks

pytest.importorskip("transformers")

LAYOUTS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (2, 4, dict(ulysses_size=2)), (2, 4, dict(ring_size=2)), (4, 2, dict(data_parallel_size=2, ring_size=2, preflight=False)),
    (2, 2, dict(data_parallel_size=2, sequence_parallel_size=1)),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [dict(), dict(accumulate_grad_batches=2)],
    ids=["steps", "accumulated"],
)
def test_every_rank_skips_the_same_layers(pools: Any, options: dict[str, Any]):
    chosen = LAYOUTS[:2] if options else LAYOUTS
    runs = [pools(world).run(ranks.trained, layout, rows, 0.5, options) for world, rows, layout in chosen]
    for rank in (each for run in runs for each in run):
        assert rank["error"] == ""
        assert rank["ran"] == runs[0][0]["ran"]
    # Two layouts of the same rows have the same losses.
    assert runs[0][0]["losses"] == pytest.approx(runs[1][0]["losses"], rel=1e-12)
    skipped = [len(ran) for ran in runs[0][0]["ran"]]
    assert len(skipped) == 4
    assert 4 < sum(skipped) < 28
    assert len({tuple(ran) for ran in runs[0][0]["ran"]}) > 2
    # The preflight compares all layers.
    assert all(ran == list(range(8)) for ran in runs[0][0]["tried"])


@pytest.mark.slow
def test_without_a_draw_it_is_one_devices(pools: Any):
    (one,) = pools(1).run(ranks.trained, None, 4, 0.0, {})
    for rank in pools(2).run(ranks.trained, dict(ring_size=2), 4, 1e-12, {}):
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-10)


def test_a_model_that_draws_in_another_way_is_refused(pools: Any):
    for message in pools(2).run(ranks.refused):
        assert "skips layers by its layerdrop, and does not draw by torch.rand([])" in message
