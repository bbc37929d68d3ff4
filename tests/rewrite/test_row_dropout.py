"""Dropout of a row's state, or of a whole sequence: the same on all ranks of the sequence, and at all degrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.rewrite import row_dropout_ranks as ranks

LAYOUTS: tuple[tuple[int, dict[str, int]], ...] = (
    (2, dict(ulysses_size=2)), (2, dict(ring_size=2)), (4, dict(ulysses_size=2, ring_size=2)),
)  # fmt: skip


SOME = [dict(), *(pytest.param(each, marks=pytest.mark.slow) for each in (dict(functional=False), dict(repeats=2)))]


@pytest.mark.parametrize("arguments", SOME, ids=str)
def test_every_layout_drops_the_same_of_a_row(pools: Any, arguments: dict[str, Any]):
    hold_rows(pools, LAYOUTS[:2], arguments)


@pytest.mark.slow
def test_four_ranks_drop_the_same_of_a_row(pools: Any):
    hold_rows(pools, LAYOUTS[1:], {})


def hold_rows(pools: Any, layouts: Sequence[tuple[int, dict[str, int]]], arguments: dict[str, Any]) -> None:
    runs = [pools(world).run(ranks.trained, strategy, 4, arguments) for world, strategy in layouts]
    first = runs[0][0]
    assert first["error"] == ""
    assert len(first["losses"]) == 2
    for rank in (each for run in runs for each in run):
        assert rank["losses"] == pytest.approx(first["losses"], rel=1e-12)
        assert all(torch.equal(*pair) for pair in zip(rank["dropped"], first["dropped"], strict=True))
    share = float(torch.stack(first["dropped"]).double().mean())
    assert 0.4 < share < 0.6
    # Rows, repeats and steps have masks of their own.
    masks = [row for step in first["dropped"] for row in step]
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks)


@pytest.mark.slow
def test_a_row_keeps_its_mask_in_any_data_parallel_group(pools: Any):
    one = pools(2).run(ranks.trained, dict(ring_size=2), 4, {})[0]["dropped"]
    two = pools(4).run(ranks.trained, dict(data_parallel_size=2, ring_size=2), 2, {})
    for step in range(2):
        dealt = torch.cat([two[0]["dropped"][step], two[2]["dropped"][step]])
        assert torch.equal(dealt, one[step])


def test_tokens_whose_channels_come_first_are_each_ranks_own(pools: Any):
    first, second = pools(2).run(ranks.channels)
    assert first.shape == second.shape
    assert not torch.equal(first, second)


def test_dropout_of_a_row_in_evaluation_is_refused(pools: Any):
    for message in pools(2).run(ranks.validated):
        assert message.startswith("dropout 0.5 of a tensor (4, 61) in an evaluation step")
        assert "evaluate in eval mode" in message


def test_berts_classifier_trains_with_the_dropout_of_its_configuration(pools: Any):
    pytest.importorskip("transformers")
    for strategy in (dict(ring_size=2), dict(ulysses_size=2)):
        first, second = pools(2).run(ranks.bert, strategy)
        assert first == second
        assert len(first) == 2
