"""`ModelCheckpoint`, and runs that go on from what it saved."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import callbacks

from tests.trainer.behaviours.harness import Full, Run, behaviour, weights
from tests.trainer.behaviours.users import User, fitted, shown


def _kept(run: Run, saving: Any, **options: Any) -> dict[str, Any]:
    answer = fitted(run, callbacks=[saving], enable_checkpointing=True, **options)
    files = sorted(each.name for each in run.folder.rglob("*.ckpt"))
    best = None if saving.best_model_score is None else float(saving.best_model_score)
    return {**answer, "files": files, "best": Path(saving.best_model_path).name, "score": best}


@behaviour
def checkpoint_top_k(run: Run) -> dict[str, Any]:
    saving = callbacks.ModelCheckpoint(run.folder, monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.4f}")
    return _kept(run, saving, validation=True, max_epochs=4)


@behaviour
def checkpoint_every_n_steps(run: Run) -> dict[str, Any]:
    saving = callbacks.ModelCheckpoint(run.folder, every_n_train_steps=3, save_top_k=-1)
    return _kept(run, saving, max_epochs=2)


@behaviour
def checkpoint_every_n_epochs(run: Run) -> dict[str, Any]:
    return _kept(run, callbacks.ModelCheckpoint(run.folder, every_n_epochs=2, save_top_k=-1), max_epochs=4)


@behaviour
def checkpoint_last(run: Run) -> dict[str, Any]:
    saving = callbacks.ModelCheckpoint(run.folder, save_last=True, monitor="train_loss")
    return _kept(run, saving, max_epochs=2)


@behaviour
def checkpoint_last_link(run: Run) -> dict[str, Any]:
    return _kept(run, callbacks.ModelCheckpoint(run.folder, save_last="link"), max_epochs=2)


@behaviour
def checkpoint_by_time(run: Run) -> dict[str, Any]:
    saving = callbacks.ModelCheckpoint(run.folder, train_time_interval=timedelta(microseconds=1), save_top_k=-1)
    return _kept(run, saving, max_epochs=1)


@behaviour
def checkpoint_weights_only(run: Run) -> dict[str, Any]:
    user, saving = User(), callbacks.ModelCheckpoint(run.folder, save_weights_only=True, filename="w")
    trainer = run.trainer(callbacks=[saving], enable_checkpointing=True)
    trainer.fit(user, run.loader())
    torch.manual_seed(99)
    other = User()
    tested = run.trainer().test(other, run.validation(4, 24), ckpt_path=str(run.folder / "w.ckpt"), verbose=False)
    return shown(trainer, user, tested=tested, loaded=weights(other))


@behaviour
def checkpoint_best_and_last_by_name(run: Run) -> dict[str, Any]:
    saving = callbacks.ModelCheckpoint(run.folder, monitor="val_loss", save_last=True, filename="best")
    user, trainer = User(), run.trainer(callbacks=[saving], enable_checkpointing=True, max_epochs=3)
    trainer.fit(user, run.loader(), run.validation(6, 24))
    best = trainer.test(dataloaders=run.validation(4, 24), ckpt_path="best", verbose=False)
    last = trainer.test(dataloaders=run.validation(4, 24), ckpt_path="last", verbose=False)
    return shown(trainer, user, best=best, last=last)


@behaviour
def resume(run: Run) -> dict[str, Any]:
    saving = callbacks.ModelCheckpoint(run.folder, every_n_train_steps=8, filename="at")
    first, trainer = User(), run.trainer(callbacks=[saving], enable_checkpointing=True, max_epochs=2)
    trainer.fit(first, run.loader())
    torch.manual_seed(11)
    second, again = User(), run.trainer(max_epochs=3)
    again.fit(second, run.loader(), ckpt_path=str(run.folder / "at.ckpt"))
    return shown(again, second, first=first.losses)


def _resumed_behind_an_epoch(run: Run, size: int = 8, micro: int = 2, accumulation: int = 1) -> dict[str, Any]:
    first, trainer = User(), run.trainer()
    trainer.fit(first, run.loader(data=Full(8)))
    trainer.save_checkpoint(run.folder / "behind.ckpt")
    torch.manual_seed(11)
    second, again = User(), run.trainer(max_epochs=3, accumulate_grad_batches=accumulation)
    again.fit(second, run.loader(data=Full(size), micro=micro), ckpt_path=str(run.folder / "behind.ckpt"))
    return shown(again, second, first=first.losses)


@behaviour
def resume_behind_an_epoch_with_more_samples(run: Run) -> dict[str, Any]:
    return _resumed_behind_an_epoch(run, size=12)


@behaviour
def resume_behind_an_epoch_with_larger_batches(run: Run) -> dict[str, Any]:
    return _resumed_behind_an_epoch(run, micro=4)


@behaviour
def resume_behind_an_epoch_with_accumulation(run: Run) -> dict[str, Any]:
    return _resumed_behind_an_epoch(run, accumulation=2)


@behaviour
def checkpoint_on_exception(run: Run) -> dict[str, Any]:
    saving = callbacks.ModelCheckpoint(run.folder, save_on_exception=True)
    return fitted(run, callbacks=[saving], enable_checkpointing=True)


@behaviour
def on_exception_checkpoint(run: Run) -> dict[str, Any]:
    return fitted(run, callbacks=[callbacks.OnExceptionCheckpoint(run.folder)], enable_checkpointing=True)
