"""Loop counters that a resume has rewritten: Lightning, given them, trains on exactly what was left, in one process without ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from lightning_sp.data.loop_state import align_loop_state

# Of Lightning's own: few workers, treespecs, a folder that is there.
pytestmark = pytest.mark.filterwarnings("ignore")
NUM = 8  # micro-batches of an epoch, of the run that stores; one that resumes has as many steps in it


class Resumed(Sampler):
    """Micro-batches in order; the first epoch begins behind those that were consumed."""

    def __init__(self, num, skip):
        self.num, self.skip = num, skip

    def __iter__(self):
        first, self.skip = self.skip, 0
        return iter(range(first, self.num))

    def __len__(self):
        return self.num


class Counts(pl.LightningModule):
    """Notes the samples it trains on, the steps and the batches of validations."""

    def __init__(self, align):
        super().__init__()
        self.align = align
        self.layer = torch.nn.Linear(1, 1)
        self.samples, self.indices, self.validated = [], [], []

    def on_load_checkpoint(self, checkpoint):
        self.align(checkpoint, self.trainer)  # Lightning loads the loops behind this

    def training_step(self, batch, batch_idx):
        self.samples.append(int(batch))
        self.indices.append(batch_idx)
        return self.layer(batch.view(1, 1).float()).sum()

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Saves(pl.Callback):
    """Stores a checkpoint at each moment at which a user may."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, trainer, moment):
        number = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        trainer.save_checkpoint(self.folder / f"{moment} {number}.ckpt")

    def on_train_batch_end(self, trainer, *_):
        self.save(trainer, "batch")

    def on_validation_end(self, trainer, *_):
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, *_):
        self.save(trainer, "epoch")

    def on_train_end(self, trainer, *_):
        self.save(trainer, "end")


def fit(
    folder: Path, *, num: int = NUM, skip: int = 0, ckpt_path: str | None = None, align: Any = None, **options: Any
) -> tuple[Counts, pl.Trainer]:
    """Train three epochs on one device."""
    module = Counts(align)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Saves(folder)],
        num_sanity_val_steps=0, **{"max_epochs": 3, **options},
    )  # fmt: skip
    data = torch.arange(num)
    validates = options.get("limit_val_batches", 1) != 0
    trainer.fit(
        module,
        DataLoader(data, sampler=Resumed(num, skip), batch_size=None),
        DataLoader(data[:1], batch_size=None) if validates else None,
        ckpt_path=ckpt_path,
        weights_only=False,
    )
    return module, trainer


NO_VAL: dict[str, Any] = {"limit_val_batches": 0}
BY_BATCHES: dict[str, Any] = {"val_check_interval": 3, "check_val_every_n_epoch": None}
# Options of the run that stored, the moment and the micro-batches begun then, options of the one that resumes.
CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({}, "batch 3", {}),
    ({}, "batch 8", {}),
    ({}, "validation 8", {}),
    ({}, "validation 8", NO_VAL),
    ({}, "epoch 8", {}),
    ({}, "batch 11", NO_VAL),
    (NO_VAL, "batch 11", {}),
    (NO_VAL, "batch 8", {"max_steps": 20}),
    ({"accumulate_grad_batches": 2}, "batch 4", {"accumulate_grad_batches": 2}),
    ({"accumulate_grad_batches": 2}, "batch 5", {"accumulate_grad_batches": 2}),
    ({"accumulate_grad_batches": 2}, "batch 4", {}),
    ({"accumulate_grad_batches": 2}, "batch 12", {"accumulate_grad_batches": 4}),
    ({"accumulate_grad_batches": 2}, "batch 8", {"accumulate_grad_batches": 4}),
    ({"accumulate_grad_batches": 2}, "batch 16", {"accumulate_grad_batches": 1, **BY_BATCHES}),
    ({"accumulate_grad_batches": 2}, "epoch 8", {"accumulate_grad_batches": 4}),
    (NO_VAL, "batch 12", {"accumulate_grad_batches": 2}),
    ({"val_check_interval": 2}, "batch 4", {"val_check_interval": 2}),
    ({"val_check_interval": 2}, "validation 4", {"val_check_interval": 2}),
    ({"val_check_interval": 2}, "validation 4", NO_VAL),
    ({"val_check_interval": 2}, "validation 6", {"val_check_interval": 4}),
    ({"val_check_interval": 0.5}, "validation 12", {"val_check_interval": 3}),
    ({"val_check_interval": 0.5}, "validation 12", {"val_check_interval": 0.5}),
    ({"max_steps": 3}, "batch 3", {}),
    ({"max_steps": 3}, "end 3", {}),
    ({"max_steps": 3}, "end 3", {"max_steps": 20}),
    ({"max_steps": 8}, "end 8", {"max_steps": 20}),
    ({"max_steps": 8}, "end 8", {"max_steps": 20, **NO_VAL}),
    ({"max_steps": 11, **BY_BATCHES}, "end 11", {"max_steps": 20, **BY_BATCHES}),
    (BY_BATCHES, "validation 9", BY_BATCHES),
    ({"check_val_every_n_epoch": 2}, "epoch 8", {"check_val_every_n_epoch": 2, "max_steps": 20}),
    ({"check_val_every_n_epoch": 2}, "validation 16", {"check_val_every_n_epoch": 2}),
    ({"limit_train_batches": 6}, "batch 6", {"limit_train_batches": 6}),
    ({"limit_train_batches": 6}, "epoch 6", {"limit_train_batches": 6}),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return the folder of a run's checkpoints, and the steps behind which it validates, each run once."""
    known: dict[str, tuple[Path, list[int]]] = {}

    def folder_of(options: dict[str, Any]) -> tuple[Path, list[int]]:
        if repr(options) not in known:
            folder = tmp_path_factory.mktemp("stored")
            known[repr(options)] = folder, fit(folder, **options)[0].validated
        return known[repr(options)]

    return folder_of


@pytest.mark.parametrize(("before", "moment", "after"), CASES)
def test_what_was_left_is_trained_on(stored, tmp_path, before, moment, after):
    folder, validates = stored(before)
    path = folder / f"{moment}.ckpt"
    stored_accumulation, now = (each.get("accumulate_grad_batches", 1) for each in (before, after))
    # The global batch is the same, so that a step of more micro-batches has smaller ones.
    length, step = NUM * now // stored_accumulation, torch.load(path, weights_only=False)["global_step"]
    num, consumed = after.get("limit_train_batches", length), step * now
    epoch, done = divmod(consumed, num)

    def align(checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        loops, steps = checkpoint["loops"]["fit_loop"], done // now
        align_loop_state(
            loops, trainer, epoch=epoch, steps=steps, stored_accumulation=stored_accumulation, loader_length=length
        )

    module, trainer = fit(tmp_path, num=length, skip=done, ckpt_path=str(path), align=align, **after)
    expected = [each % num for each in range(consumed, 3 * num)][: (after.get("max_steps", 10**9) - step) * now]
    assert module.samples == module.indices == expected
    assert trainer.global_step == step + len(expected) // now
    assert trainer.fit_loop.epoch_loop.batch_progress.total.ready == consumed + len(expected)
    # By which loggers count.
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == trainer.global_step
    if before == after:
        assert [each for each in module.validated if each > step] == [each for each in validates if each > step]
