"""Lightning's callbacks and its Tuner."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm

from tests.trainer.behaviours.harness import Run, behaviour
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
    user, trainer = User(), run.trainer(max_epochs=2)
    found = Tuner(trainer).lr_find(user, run.loader(40), num_training=15, early_stop_threshold=None)
    trainer.fit(user, run.loader())
    # Not the weights: AdamW steps by the sign of gradients that are rounding alone.
    return {"losses": user.losses[-4:], "suggested": found.suggestion(), "tried": found.results["loss"]}


@behaviour
def tuner_batch_size(run: Run) -> dict[str, Any]:
    class Sized(User):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return run.loader(32, micro=self.batch_size)

        def val_dataloader(self) -> Any:
            return run.validation(4, 24)

    user, trainer = Sized(), run.trainer(max_steps=2)
    return {"size": Tuner(trainer).scale_batch_size(user, mode="power", max_trials=2, steps_per_trial=1)}


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
