"""Lightning's callbacks, loggers, profilers and progress bars."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities import grad_norm

from tests.trainer.behaviours.harness import Run, behaviour, weights
from tests.trainer.behaviours.users import User, fitted, shown


@behaviour
def early_stopping(run: Run) -> dict[str, Any]:
    stopping = callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)
    answer = fitted(run, validation=True, callbacks=[stopping], max_epochs=6)
    return {**answer, "stopped": stopping.stopped_epoch, "best": float(stopping.best_score)}


@behaviour
def early_stopping_in_training(run: Run) -> dict[str, Any]:
    stopping = callbacks.EarlyStopping("train_loss", check_on_train_epoch_end=True, stopping_threshold=4.0)
    return {**fitted(run, callbacks=[stopping], max_epochs=6), "stopped": stopping.stopped_epoch}


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
    from datetime import timedelta

    saving = callbacks.ModelCheckpoint(run.folder, train_time_interval=timedelta(microseconds=1), save_top_k=-1)
    return _kept(run, saving, max_epochs=1)


@behaviour
def checkpoint_weights_only(run: Run) -> dict[str, Any]:
    user, saving = User(), callbacks.ModelCheckpoint(run.folder, save_weights_only=True, filename="w")
    trainer = run.trainer(callbacks=[saving], enable_checkpointing=True)
    trainer.fit(user, run.loader())
    torch.manual_seed(99)
    other = User()
    tested = run.trainer().test(other, run.loader(4, 24), ckpt_path=str(run.folder / "w.ckpt"), verbose=False)
    return shown(trainer, user, tested=tested, loaded=weights(other))


@behaviour
def checkpoint_best_and_last_by_name(run: Run) -> dict[str, Any]:
    saving = callbacks.ModelCheckpoint(run.folder, monitor="val_loss", save_last=True, filename="best")
    user, trainer = User(), run.trainer(callbacks=[saving], enable_checkpointing=True, max_epochs=3)
    trainer.fit(user, run.loader(), run.loader(6, 24))
    best = trainer.test(dataloaders=run.loader(4, 24), ckpt_path="best", verbose=False)
    last = trainer.test(dataloaders=run.loader(4, 24), ckpt_path="last", verbose=False)
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


class Finetuning(callbacks.BaseFinetuning):
    """Thaws the first layer in the second epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        pl_module.configure_model()
        pl_module.double()  # or plain Lightning would load a checkpoint into float32
        self.freeze(pl_module.model.layers[0])

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.layers[0], optimizer, lr=0.01)


@behaviour
def finetuning(run: Run) -> dict[str, Any]:
    return fitted(run, callbacks=[Finetuning()], max_epochs=3)


def _resumed_finetuning(run: Run, at: int) -> dict[str, Any]:
    user, trainer = User(), run.trainer(callbacks=[Finetuning()], max_epochs=at)
    trainer.fit(user, run.loader())
    trainer.save_checkpoint(run.folder / "half.ckpt")
    again, second = run.trainer(callbacks=[Finetuning()], max_epochs=4), User()
    again.fit(second, run.loader(), ckpt_path=str(run.folder / "half.ckpt"))
    return shown(again, second, first=user.losses)


@behaviour
def finetuning_resumed_frozen(run: Run) -> dict[str, Any]:
    return _resumed_finetuning(run, 1)


@behaviour
def finetuning_resumed_thawed(run: Run) -> dict[str, Any]:
    return _resumed_finetuning(run, 2)


@behaviour
def finetuning_backbone(run: Run) -> dict[str, Any]:
    class Backbone(User):
        def configure_model(self) -> None:
            if self.model is None:
                super().configure_model()
                self.backbone = self.model.layers

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)

    user = Backbone()
    user.configure_model()
    finetune = callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    return fitted(run, user, callbacks=[finetune], max_epochs=3)


@behaviour
def pruning(run: Run) -> dict[str, Any]:
    user = User()
    user.configure_model()
    user.double()
    parts = [(user.model.head, "weight")]
    return fitted(run, user, callbacks=[callbacks.ModelPruning("l1_unstructured", parts, amount=0.5)], max_epochs=2)


@behaviour
def stochastic_weight_averaging(run: Run) -> dict[str, Any]:
    user = User()
    user.configure_model()  # Lightning copies the module in `setup`, before it would call that
    return fitted(run, user, callbacks=[callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)], max_epochs=4)


@behaviour
def weight_averaging_ema(run: Run) -> dict[str, Any]:
    return fitted(run, validation=True, callbacks=[callbacks.EMAWeightAveraging(decay=0.9)], max_epochs=2)


@behaviour
def gradient_norm(run: Run) -> dict[str, Any]:
    class Norms(User):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = grad_norm(self, norm_type=2)
            self.seen.append({name: float(value) for name, value in norms.items()})
            self.log_dict(norms)

    return fitted(run, Norms())


@behaviour
def gradient_norm_infinite(run: Run) -> dict[str, Any]:
    class Norms(User):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append({name: float(value) for name, value in grad_norm(self, "inf").items()})

    return fitted(run, Norms())


@behaviour
def csv_logger(run: Run) -> dict[str, Any]:
    logger = CSVLogger(run.folder, name="", version="run", flush_logs_every_n_steps=1)
    monitor = callbacks.LearningRateMonitor("step")
    answer = fitted(run, validation=True, logger=logger, callbacks=[monitor], log_every_n_steps=1, max_epochs=2)
    with (run.folder / "run" / "metrics.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return {**answer, "rows": rows}


@behaviour
def csv_logger_hyperparameters(run: Run) -> dict[str, Any]:
    class Keeps(User):
        def __init__(self, width: int = 3, name: str = "x") -> None:
            super().__init__()
            self.save_hyperparameters()

    logger = CSVLogger(run.folder, name="", version="run")
    answer = fitted(run, Keeps(4), logger=logger, log_every_n_steps=1)
    return {**answer, "kept": (run.folder / "run" / "hparams.yaml").read_text()}


@behaviour
def learning_rate_monitor(run: Run) -> dict[str, Any]:
    logger = CSVLogger(run.folder, name="", version="run")
    monitor = callbacks.LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    return fitted(run, logger=logger, callbacks=[monitor], log_every_n_steps=1)


@behaviour
def log_every_n_steps(run: Run) -> dict[str, Any]:
    logger = CSVLogger(run.folder, name="", version="run", flush_logs_every_n_steps=1)
    answer = fitted(run, logger=logger, log_every_n_steps=3, max_epochs=2)
    return {**answer, "rows": (run.folder / "run" / "metrics.csv").read_text().count("\n")}


def _profiled(run: Run, profiler: Any) -> dict[str, Any]:
    answer = fitted(run, profiler=profiler, max_steps=3)
    return {**answer, "files": len(list(run.folder.glob("*.txt"))) > 0}


@behaviour
def profiler_simple(run: Run) -> dict[str, Any]:
    return _profiled(run, SimpleProfiler(run.folder, "simple"))


@behaviour
def profiler_advanced(run: Run) -> dict[str, Any]:
    return _profiled(run, AdvancedProfiler(run.folder, "advanced"))


@behaviour
def profiler_pytorch(run: Run) -> dict[str, Any]:
    return _profiled(run, PyTorchProfiler(run.folder, "pytorch", export_to_chrome=False))


@behaviour
def progress_bar_tqdm(run: Run) -> dict[str, Any]:
    bar = callbacks.TQDMProgressBar()
    return fitted(run, validation=True, enable_progress_bar=True, callbacks=[bar])


@behaviour
def progress_bar_rich(run: Run) -> dict[str, Any]:
    bar = callbacks.RichProgressBar()
    return fitted(run, validation=True, enable_progress_bar=True, callbacks=[bar])


@behaviour
def model_summary(run: Run) -> dict[str, Any]:
    from lightning.pytorch.utilities.model_summary import summarize

    class Summed(User):
        def on_train_start(self) -> None:
            told = summarize(self, max_depth=2)
            self.seen.append((told.total_parameters, told.trainable_parameters, round(told.model_size, 6)))

    return fitted(run, Summed(), callbacks=[callbacks.RichModelSummary(2)], enable_model_summary=True)


@behaviour
def device_stats(run: Run) -> dict[str, Any]:
    logger = CSVLogger(run.folder, name="", version="run")
    return fitted(run, logger=logger, callbacks=[callbacks.DeviceStatsMonitor()], log_every_n_steps=1)


@behaviour
def timer(run: Run) -> dict[str, Any]:
    each = callbacks.Timer(duration={"hours": 1}, interval="epoch")
    answer = fitted(run, callbacks=[each])
    return {**answer, "timed": each.time_elapsed("train") > 0}


@behaviour
def lambda_callback(run: Run) -> dict[str, Any]:
    called: list[str] = []
    each = callbacks.LambdaCallback(
        on_train_start=lambda *_: called.append("start"), on_train_batch_end=lambda *_: called.append("batch")
    )
    return {**fitted(run, callbacks=[each]), "called": called}


@behaviour
def spike_detection(run: Run) -> dict[str, Any]:
    if not hasattr(callbacks, "SpikeDetection"):
        return {}
    return fitted(run, callbacks=[callbacks.SpikeDetection()])


@behaviour
def tuner_learning_rate(run: Run) -> dict[str, Any]:
    from lightning.pytorch.tuner import Tuner

    user, trainer = User(), run.trainer(max_epochs=2)
    found = Tuner(trainer).lr_find(user, run.loader(40), num_training=15, early_stop_threshold=None)
    trainer.fit(user, run.loader())
    return {
        "losses": user.losses[-4:],
        "suggested": found.suggestion(),
        "weights": weights(user),
        "tried": found.results["loss"],
    }


@behaviour
def tuner_batch_size(run: Run) -> dict[str, Any]:
    from lightning.pytorch.tuner import Tuner

    class Sized(User):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return run.loader(32, micro=self.batch_size)

    user, trainer = Sized(), run.trainer(max_steps=2)
    return {"size": Tuner(trainer).scale_batch_size(user, mode="power", max_trials=2, steps_per_trial=1)}


@behaviour
def checkpoint_on_exception(run: Run) -> dict[str, Any]:
    saving = callbacks.ModelCheckpoint(run.folder, save_on_exception=True)
    return fitted(run, callbacks=[saving], enable_checkpointing=True)


@behaviour
def on_exception_checkpoint(run: Run) -> dict[str, Any]:
    return fitted(run, callbacks=[callbacks.OnExceptionCheckpoint(run.folder)], enable_checkpointing=True)


@behaviour
def throughput_monitor(run: Run) -> dict[str, Any]:
    logger = CSVLogger(run.folder, name="", version="run")
    each = callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch["input_ids"]))
    return fitted(run, logger=logger, callbacks=[each])


class Writer(callbacks.BasePredictionWriter):
    """Keeps what it is given."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.written: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        self.written.append((batch_idx, prediction, batch_indices))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.written.append((list(predictions), batch_indices))


def _written(run: Run, interval: str) -> dict[str, Any]:
    writer = Writer(interval)
    run.trainer(callbacks=[writer]).predict(User(), run.loader(5, 24), return_predictions=False)
    return {"written": writer.written}


@behaviour
def predict(run: Run) -> dict[str, Any]:
    found = run.trainer().predict(User(), run.loader(5, 24))
    return {"tokens": torch.cat(found)}


@behaviour
def prediction_writer_batch(run: Run) -> dict[str, Any]:
    return _written(run, "batch")


@behaviour
def prediction_writer_epoch(run: Run) -> dict[str, Any]:
    return _written(run, "epoch")


@behaviour
def freezing_in_configure(run: Run) -> dict[str, Any]:
    class Frozen(User):
        def configure_model(self) -> None:
            if self.model is None:
                super().configure_model()
                for parameter in self.model.layers.parameters():
                    parameter.requires_grad_(False)

    return fitted(run, Frozen())
