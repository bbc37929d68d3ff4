"""`load_from_checkpoint` reads folders of ours alone; a run that does so is `tests/flows/trainer/weights/load_from_checkpoint.py`."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from lightning_sp import SequenceParallelError
from lightning_sp.parallelize import MetaDevice
from lightning_sp.trainer.checkpointing.load_from_checkpoint import read_checkpoint_folders


def test_a_folder_of_ours_that_is_half_written_is_refused(tmp_path):
    torch.save({}, tmp_path / "meta.pt")
    with pytest.raises(SequenceParallelError, match="is half-written"):
        pl.LightningModule.load_from_checkpoint(tmp_path)


def test_anything_else_goes_to_lightning_once(tmp_path):
    read_checkpoint_folders()
    with pytest.raises(IsADirectoryError) as raised:
        pl.LightningModule.load_from_checkpoint(tmp_path)
    assert sum(entry.name == "read" for entry in raised.traceback) == 1


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


def test_a_teacher_is_loaded_where_a_model_is_built_without_memory(tmp_path):
    """Ranks but 0 build on the meta device in `configure_model`."""
    weights = {"layer.weight": torch.ones(2, 2), "layer.bias": torch.ones(2)}
    torch.save({"state_dict": weights, "pytorch-lightning_version": pl.__version__}, tmp_path / "x.ckpt")
    with MetaDevice():
        teacher = Small.load_from_checkpoint(tmp_path / "x.ckpt")
        assert Small().layer.weight.is_meta
    assert teacher.layer.weight.tolist() == [[1, 1], [1, 1]]
