"""Two runs that write one checkpoint: the second is refused while the first writes, and goes on when that has ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sp import SequenceParallelError
from lightning_sp.checkpoint import load_checkpoint, save, save_checkpoint
from lightning_sp.checkpoint.folders.folder import partial_path
from lightning_sp.checkpoint.folders.writing import begin_file, begin_folder, end_writing

FORK = multiprocessing.get_context("fork")
REFUSED = r"x\.ckpt\.partial is being written by another process: two runs write one folder"
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def checkpoint(value: float) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((4, 1), value)}, "step": int(value), "loops": {}}


def read(path: Path) -> tuple[int, float]:
    found = load_checkpoint(path, torch.nn.Embedding(4, 1), with_optimizers=False)
    return found["step"], float(found["state_dict"]["weight"][0])


def write(path: Path, value: float, as_folder: bool, said: Any) -> None:
    try:
        save_checkpoint(checkpoint(value), path, as_folder=as_folder)
        said.put("")
    except SequenceParallelError as error:
        said.put(str(error))


def hold(path: Path, as_folder: bool, said: Any) -> None:
    (begin_folder if as_folder else begin_file)(partial_path(path))
    said.put("")
    time.sleep(600)


@pytest.mark.parametrize("as_folder", [True, False], ids=["folder", "file"])
def test_a_run_beside_the_one_that_writes_is_refused(tmp_path, monkeypatch, as_folder):
    path, said, others = tmp_path / "x.ckpt", FORK.Queue(), []
    own = save.dcp_save if as_folder else torch.save

    def with_another(*given: Any, **named: Any) -> Any:
        monkeypatch.undo()
        other = FORK.Process(target=write, args=(path, 2.0, as_folder, said))
        other.start()
        others.append(said.get(timeout=60))
        other.join()
        return own(*given, **named)

    monkeypatch.setattr(save if as_folder else torch, "dcp_save" if as_folder else "save", with_another)
    save_checkpoint(checkpoint(1.0), path, as_folder=as_folder)
    assert "x.ckpt.partial is being written by another process: two runs write one folder" in others[0]
    assert read(path) == (1, 1.0)
    # Behind it, anybody may.
    save_checkpoint(checkpoint(3.0), path, as_folder=as_folder)
    assert read(path) == (3, 3.0)


@pytest.mark.parametrize("as_folder", [True, False], ids=["folder", "file"])
def test_what_a_run_that_was_killed_has_left_is_written_anew(tmp_path, as_folder):
    path, said = tmp_path / "x.ckpt", FORK.Queue()
    other = FORK.Process(target=hold, args=(path, as_folder, said))
    other.start()
    said.get(timeout=60)
    with pytest.raises(SequenceParallelError, match=REFUSED):
        save_checkpoint(checkpoint(1.0), path, as_folder=as_folder)
    assert partial_path(path).exists()  # the other's
    os.kill(other.pid or 0, signal.SIGKILL)
    other.join()
    save_checkpoint(checkpoint(1.0), path, as_folder=as_folder)
    assert read(path) == (1, 1.0)


def test_a_worker_that_was_forked_while_it_was_written_holds_nothing(tmp_path):
    staging = tmp_path / "x.ckpt.partial"
    begin_folder(staging)
    worker = FORK.Process(target=time.sleep, args=(600,))
    worker.start()
    end_writing(staging)
    begin_folder(staging)
    end_writing(staging)
    worker.kill()
    worker.join()
