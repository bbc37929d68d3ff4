"""A stored cursor goes on only with the loader and the global batch that it was stored with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_sp import SequenceParallelError
from lightning_sp.data.loaders.broadcast_loader import BroadcastLoader
from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.data.resume import check_global_batch, resume_loader

CURSOR: dict[str, Any] = {
    "kind": "order", "num_samples": 12, "global_batch_size": 8, "rows": 2, "dp_size": 2, "accumulation": 2,
}  # fmt: skip


@pytest.mark.parametrize(("rows", "dp_size", "accumulation"), [(2, 2, 2), (4, 1, 2), (8, 1, 1), (1, 2, 2)])
def test_the_same_global_batch_goes_on(rows: int, dp_size: int, accumulation: int):
    check_global_batch(CURSOR, rows=rows, dp_size=dp_size, accumulation=accumulation)


@pytest.mark.parametrize(
    ("rows", "dp_size", "message"),
    [
        (3, 2, r"= 12 samples a step, .* batch is 8: at dp 2 these .* do: \[\(1, 4\), \(2, 2\), \(4, 1\)\]"),
        (2, 3, r"= 12 samples a step, .* batch is 8: 8 is not a multiple of dp 3"),
    ],
)
def test_another_global_batch_is_refused_with_those_that_do(rows: int, dp_size: int, message: str):
    with pytest.raises(SequenceParallelError, match=message):
        check_global_batch(CURSOR, rows=rows, dp_size=dp_size, accumulation=2)


def test_a_cursor_of_another_kind_of_loader_is_refused():
    loader = DataLoader([0] * 12)
    with pytest.raises(
        SequenceParallelError, match=r"whose order lightning_sp gives .12 samples., this .* is a DataLoader"
    ):
        resume_loader(loader, CURSOR)
    stream = {"kind": "stream", "steps": 3, "accumulation": 1, "epoch": 0}
    with pytest.raises(SequenceParallelError, match="of a loader that one rank reads"):
        resume_loader(loader, stream)
    resume_loader(loader, {**stream, "steps": 0})  # at an epoch's start there is nothing to skip


@pytest.mark.parametrize(
    ("epoch", "seed", "words"),
    [
        (
            1,
            None,
            "WeightedRandomSampler draws another order than the run before, from the process' random numbers, so that",
        ),
        (
            1,
            3,
            "WeightedRandomSampler draws another order than the run before, from its generator, which has begun anew",
        ),
        (0, 3, "exact if the loader gives them in the same order as before"),
    ],
)
def test_a_sampler_that_draws_another_order_is_said(epoch: int, seed: int | None, words: str):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    inner = DataLoader([0] * 12, sampler=WeightedRandomSampler([1.0] * 12, 12, generator=generator))
    loader = BroadcastLoader(inner, DataCoordinates(dp_rank=0, dp_size=1, sequence_group=None, control_group=None))
    with pytest.warns(UserWarning, match=rf"3 micro-batches of DataLoader are read again .* epoch {epoch}: .*{words}"):
        resume_loader(loader, {"kind": "read", "steps": 3, "accumulation": 1, "epoch": epoch})
    assert loader.skip == 3
