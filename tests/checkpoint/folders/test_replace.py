"""A checkpoint that takes another's place: its name is of a whole one at any moment, and a stop in between is mended."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError, SequenceParallelStrategy
from lightning_sp.checkpoint import read_checkpoint_folder, recover, remnants, save_checkpoint
from lightning_sp.checkpoint.folders import replace
from lightning_sp.checkpoint.folders.folder import partial_path, replaced_path
from tests.checkpoint.checkpoint_ranks import Heard


def save(path: Path, value: float) -> None:
    save_checkpoint({"state_dict": {"w": torch.full((2,), value)}, "loops": {}}, path, as_folder=True)


def value(path: Path) -> float:
    return float(read_checkpoint_folder(path)["state_dict"]["w"][0])


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_newer_one_takes_the_name_and_nothing_is_left(tmp_path, monkeypatch, exchanges):
    path = tmp_path / "last.ckpt"
    if not exchanges:  # NFS
        monkeypatch.setattr(replace, "exchange_names", lambda a, b: False)
    for number in (1.0, 2.0, 3.0):
        save(path, number)
        assert value(path) == number
        assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def test_the_name_is_of_a_whole_one_at_every_moment(tmp_path, monkeypatch):
    """Where names can be exchanged: before and after each system call that changes a name."""
    path, seen = tmp_path / "last.ckpt", []
    save(path, 1.0)
    exchange = replace.exchange_names

    def watched(a: Path, b: Path) -> bool:
        seen.append(value(path))
        done = exchange(a, b)
        seen.append(value(path))
        return done

    monkeypatch.setattr(replace, "exchange_names", watched)
    save(path, 2.0)
    if exchange(tmp_path, tmp_path) or seen[0] != seen[1]:  # a file system that exchanges
        assert seen == [1.0, 2.0]


class Stop(BaseException):
    pass


@pytest.mark.parametrize("at", ["older renamed", "older renamed, newer incomplete"])
def test_a_stop_between_two_renames_is_mended(tmp_path, monkeypatch, at):
    path = tmp_path / "last.ckpt"
    save(path, 1.0)
    monkeypatch.setattr(replace, "exchange_names", lambda a, b: False)
    rename = Path.rename

    def stopping(self: Path, target: Any) -> Path:
        if target == path:
            raise Stop
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stopping)
        with pytest.raises(Stop):
            save(path, 2.0)
    assert not path.exists()
    assert partial_path(path).is_dir()
    assert replaced_path(path).is_dir()
    if "incomplete" in at:
        (partial_path(path) / "manifest.json").unlink()
    assert remnants(tmp_path) == [path]
    assert "a save that was stopped had left beside it" in (recover(path) or "")
    assert value(path) == (1.0 if "incomplete" in at else 2.0)
    assert recover(path) is None
    assert remnants(tmp_path) == []


class Tiny(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, ckpt_path: str | None) -> None:
    trainer = pl.Trainer(
        strategy=SequenceParallelStrategy(sequence_dims={}), accelerator="cpu", devices=1, max_epochs=1, logger=False,
        callbacks=[ModelCheckpoint(folder, save_last=True)], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Tiny(), DataLoader(torch.ones(2, 2)), ckpt_path=ckpt_path)


def one_rank(folder: Path) -> list[str]:
    """A run whose newest checkpoint has lost its name to a stop does not begin at step 0; told so, it goes on from it."""
    fit(folder, None)
    path = folder / "last.ckpt"
    path.rename(replaced_path(path))
    said = []
    for ckpt_path in ("last", "last"):
        try:
            fit(folder, ckpt_path)
        except SequenceParallelError as error:
            said.append(str(error))
    partial_path(folder / "half.ckpt").mkdir()
    # Killed between the exchange of two names and the end of the older one.
    shutil.copytree(path, partial_path(path))
    heard = Heard()
    fit(folder, "last")
    return [*said, heard.stop()]


@pytest.mark.filterwarnings("ignore")
def test_a_run_does_not_begin_beside_a_lost_checkpoint(pools, tmp_path):
    (said,) = pools(1).run(one_rank, tmp_path)
    assert len(said) == 2
    assert "had left 1 checkpoints without their names" in said[0]
    assert value_of_step(tmp_path) > 0
    left = f"{tmp_path / 'half.ckpt.partial'}, {tmp_path / 'last.ckpt.partial'}"
    assert f"not yet deleted: {left}; delete them, if no other run" in said[1]


def value_of_step(folder: Path) -> int:
    return int(read_checkpoint_folder(folder / "last.ckpt")["global_step"])
