"""Loop counters that a resume has rewritten: Lightning, given them, trains on exactly what was left, in one process without ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Sampler

from lightning_sp.data.loop_state import ENDLESS, align_loop_state, finished_epoch

# Of Lightning's own: few workers, treespecs, a folder that is there.
pytestmark = pytest.mark.filterwarnings("ignore")
NUM = 8  # micro-batches of one sample in an epoch


class Resumed(Sampler):
    """Samples in order; the first epoch begins behind those that were consumed."""

    def __init__(self, skip):
        self.skip = skip

    def __iter__(self):
        first, self.skip = self.skip, 0
        return iter(range(first, NUM))

    def __len__(self):
        return NUM


class Counts(pl.LightningModule):
    """Notes the samples it trains on, the steps and the batches of validations."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.samples, self.indices, self.validated = [], [], []

    def training_step(self, batch, batch_idx):
        self.samples.append(int(batch))
        self.indices.append(batch_idx)
        return self.layer(batch.view(1, 1).float()).sum()

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, *, skip: int = 0, ckpt_path: str | None = None, **options: Any) -> tuple[Counts, pl.Trainer]:
    """Train three epochs of 8 on one device, with a checkpoint at each step and each validation."""
    module = Counts()
    saves = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[saves],
        num_sanity_val_steps=0, **{"max_epochs": 3, **options},
    )  # fmt: skip
    data = torch.arange(NUM)
    validates = options.get("limit_val_batches", 1) != 0
    trainer.fit(
        module,
        DataLoader(data, sampler=Resumed(skip), batch_size=None),
        DataLoader(data[:1], batch_size=None) if validates else None,
        ckpt_path=ckpt_path,
        weights_only=False,
    )
    return module, trainer


NO_VAL: dict[str, Any] = {"limit_val_batches": 0}
CASES: list[tuple[dict[str, Any], int, int, dict[str, Any]]] = [
    # Options of the run that stored, its accumulation and the step of the checkpoint, options of the one that resumes.
    ({}, 1, 3, {}),
    ({}, 1, 8, {}),
    ({}, 1, 11, NO_VAL),
    (NO_VAL, 1, 11, {}),
    ({}, 2, 2, {}),
    ({}, 2, 2, {"accumulate_grad_batches": 1}),
    ({}, 2, 6, {"accumulate_grad_batches": 4}),
    ({}, 2, 4, {"accumulate_grad_batches": 4}),
    ({}, 2, 8, {"accumulate_grad_batches": 4}),
    ({}, 1, 12, {"accumulate_grad_batches": 2}),
    ({"val_check_interval": 2}, 1, 4, {"val_check_interval": 2}),
    ({"val_check_interval": 2}, 1, 4, NO_VAL),
    ({"val_check_interval": 2}, 1, 4, {"val_check_interval": 4}),
    ({"val_check_interval": 0.5}, 1, 12, {"val_check_interval": 3}),
    ({"max_steps": 3}, 1, 3, {}),
    ({"max_steps": 3}, 1, 3, {"max_steps": 20}),
    ({"max_steps": 8}, 1, 8, {"max_steps": 20}),
    ({"max_steps": 11, "val_check_interval": 3, "check_val_every_n_epoch": None}, 1, 11, {"max_steps": 20}),
    ({"check_val_every_n_epoch": 2}, 1, 8, {"check_val_every_n_epoch": 2, "max_steps": 20}),
]  # fmt: skip


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return the folder of a run's checkpoints, each run once."""
    known: dict[str, Path] = {}

    def folder_of(options: dict[str, Any], accumulation: int) -> Path:
        key = repr((options, accumulation))
        if key not in known:
            known[key] = tmp_path_factory.mktemp("stored")
            fit(known[key], accumulate_grad_batches=accumulation, **options)
        return known[key]

    return folder_of


@pytest.mark.parametrize(("before", "accumulation", "step", "after"), CASES)
def test_what_was_left_is_trained_on(stored, tmp_path, before, accumulation, step, after):
    checkpoint = torch.load(next(stored(before, accumulation).glob(f"step={step}*.ckpt")), weights_only=False)
    samples = step * accumulation
    epoch, done = divmod(samples, NUM)
    now = after.get("accumulate_grad_batches", accumulation)
    resumes = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False, **{"max_epochs": 3, "accumulate_grad_batches": now, **after})  # fmt: skip
    align_loop_state(
        checkpoint["loops"]["fit_loop"], resumes, epoch=epoch, steps=done // now, stored_accumulation=accumulation, loader_length=NUM
    )  # fmt: skip
    torch.save(checkpoint, tmp_path / "aligned.ckpt")
    module, trainer = fit(
        tmp_path / "on",
        skip=done,
        ckpt_path=str(tmp_path / "aligned.ckpt"),
        **{"accumulate_grad_batches": now, **after},
    )
    steps = after.get("max_steps", 10**9)
    expected = [each % NUM for each in range(samples, 3 * NUM)][: (steps - step) * now]
    assert module.samples == expected
    assert trainer.global_step == step + len(expected) // now
