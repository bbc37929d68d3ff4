"""What a strategy is asked before a run: by a script that makes its own samplers, say."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only

from lightning_sp import SequenceParallelStrategy
from tests.trainer.whole_runs import before_a_run_ranks as ranks


@pytest.fixture(autouse=True)
def own_rank(monkeypatch):
    """A Trainer tells Lightning's helpers which rank this process is, and the tests behind these are on rank 0."""
    for each in (rank_zero_only, utils_rank_zero_only):
        monkeypatch.setattr(each, "rank", 0, raising=False)


@pytest.mark.parametrize(("rank", "reads"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_which_samples_a_rank_reads_is_known(monkeypatch, rank, reads):
    """It was the answer of a single process, so that all ranks read the same samples."""
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(data_parallel_size=2), accelerator="cpu", devices=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    strategy = trainer.strategy
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": reads}
    assert (strategy.data_parallel_rank, strategy.data_parallel_size) == (reads, 2)
    assert (strategy.world_size, strategy.global_rank, strategy.root_device) == (4, rank, torch.device("cpu"))


def test_what_speaks_to_other_ranks_speaks_to_none():
    strategy = SequenceParallelStrategy()
    assert (strategy.data_parallel_rank, strategy.data_parallel_size) == (0, 1)
    assert strategy.broadcast("a") == "a"
    assert strategy.reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    assert strategy.barrier() is None


def test_how_many_steps_there_will_be_is_known_and_changes_no_run(pools):
    """It was an assertion of this package's own."""
    asked, silent = (pools(2).run(ranks.fit, 2, asks) for asks in (True, False))
    for after, plain in zip(asked, silent, strict=True):
        assert after["foretold"] == after["steps"] == plain["steps"] == 2
        assert after["losses"] == plain["losses"]


class Externally(LightningEnvironment):
    """Says of ranks that it has started that Lightning is to start them."""

    @property
    def creates_processes_externally(self) -> bool:
        return False


def test_an_error_of_the_launcher_is_told_as_it_is(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(), accelerator="cpu", devices=2, plugins=[Externally()], barebones=True
    )
    with pytest.raises(
        RuntimeError, match="Lightning attempted to launch new distributed processes with `local_rank > 0`"
    ):
        trainer.fit(BoringModel())
