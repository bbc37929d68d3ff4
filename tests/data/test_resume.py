"""A stored cursor goes on only with the loader and the global batch that it was stored with."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_sp import SequenceParallelError
from lightning_sp.data.loaders.broadcast_loader import BroadcastLoader
from lightning_sp.data.loaders.coordinates import DataCoordinates
from lightning_sp.data.loop_state import ENDLESS
from lightning_sp.data.resume import align_loops, check_epoch_end, check_global_batch, loader_cursor, resume_loader

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
        SequenceParallelError, match=r"whose samples lightning_sp orders .12 samples., but this .* a DataLoader"
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


def trainer(accumulation: int = 1) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=accumulation,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*LeafSpec")
@pytest.mark.parametrize(
    ("done", "length", "expected"),
    [(0, 8, (2, 0)), (5, 8, (2, 2)), (6, 8, (2, 3)), (8, 8, (3, 0)), (8, ENDLESS, (2, 4))],
)
def test_the_cursor_of_a_loader_that_is_read_counts_whole_steps(done: int, length: int, expected: tuple[int, int]):
    """Micro-batches of a window that has not stepped are read again."""
    saves = trainer(2)
    loop = saves.fit_loop
    assert loader_cursor(saves, epoch=2, rows=3, dp_size=2) is None  # nothing was read
    loop._combined_loader = CombinedLoader([DataLoader([0] * 8), DataLoader([0] * 8)])
    loop.max_batches, loop.epoch_loop.batch_progress.current.processed = length, done
    cursor = loader_cursor(saves, epoch=2, rows=3, dp_size=2)
    assert cursor is not None
    assert (cursor.pop("epoch"), cursor.pop("steps")) == expected
    assert cursor == {
        "own_states": None, "kind": "read", "loaders": 2, "rows": 3, "dp_size": 2, "accumulation": 2, "global_batch_size": 12,
    }  # fmt: skip


READ: dict[str, Any] = {"kind": "read", "loaders": 1, "epoch": 0, "steps": 3, "dp_size": 2, "accumulation": 2}


@pytest.mark.parametrize(
    ("given", "dp_size", "accumulation", "message"),
    [
        (
            {"loaders": 2},
            2,
            2,
            r"within an epoch \(3 steps\) over 2 training loaders, of which only the common count is",
        ),
        ({}, 1, 2, r"\(3 steps\) .* data_parallel_size=2 and accumulate_grad_batches=2; this run has 1 and 2, which"),
        ({}, 2, 4, r"\(3 steps\) .* data_parallel_size=2 and accumulate_grad_batches=2; this run has 2 and 4, which"),
    ],
)
def test_a_cursor_within_an_epoch_goes_on_as_it_was_read(
    given: dict[str, Any], dp_size: int, accumulation: int, message: str
):
    state = trainer().fit_loop.state_dict()
    with pytest.raises(SequenceParallelError, match=message):
        align_loops({**READ, **given}, state, trainer(accumulation), dp_size=dp_size)
    # At an epoch's start there is nothing to read otherwise.
    align_loops({**READ, **given, "steps": 0}, state, trainer(accumulation), dp_size=dp_size)
    assert state["epoch_loop.batch_progress"]["current"]["ready"] == 0


def test_counters_follow_a_cursor():
    state = trainer().fit_loop.state_dict()
    align_loops(READ, state, trainer(2), dp_size=2)
    assert state["epoch_loop.batch_progress"]["current"]["ready"] == 6
    state = trainer().fit_loop.state_dict()
    order = {**CURSOR, "epoch": 1, "global_samples_consumed": 8, "last": "drop"}
    align_loops(order, state, trainer(4), dp_size=1)
    progress = state["epoch_loop.batch_progress"]
    # Of 12 samples one step of 8 is trained on in an epoch: 2 micro-batches of 4 before, 4 of 2 in this run.
    assert (progress["current"]["ready"], progress["total"]["ready"]) == (4, 8)
    assert state["epoch_progress"]["current"]["ready"] == 2


@pytest.mark.parametrize(("done", "is_last", "refused"), [(0, False, False), (3, True, False), (3, False, True)])
def test_a_checkpoint_without_a_cursor_goes_on_from_an_epochs_end(done: int, is_last: bool, refused: bool):
    state = trainer().fit_loop.state_dict()
    state["epoch_progress"]["current"]["processed"] = 2
    state["epoch_loop.batch_progress"]["current"]["ready"] = done
    state["epoch_loop.batch_progress"]["is_last_batch"] = is_last
    if not refused:
        check_epoch_end(state, trainer())
        return
    with pytest.raises(
        SequenceParallelError, match="stored within epoch 2, after 3 micro-batches, and holds no data cursor"
    ):
        check_epoch_end(state, trainer())
