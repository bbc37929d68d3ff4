"""Hooks of the module, data modules, and what is asked of the Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from torch import Tensor

from tests.trainer.behaviours.harness import Full, Run, behaviour, weights
from tests.trainer.behaviours.users import Batch, User, fitted, full, shown


@behaviour
def order_of_hooks(run: Run) -> dict[str, Any]:
    called: list[str] = []

    def remember(name: str) -> Any:
        return lambda *_: called.append(name)

    names = [
        n for n in vars(callbacks.Callback) if n.startswith("on_") and "checkpoint" not in n and n != "on_exception"
    ]
    watching = callbacks.LambdaCallback(**{name: remember(name) for name in names})
    answer = fitted(run, validation=True, callbacks=[watching], num_sanity_val_steps=1)
    return {**answer, "called": called}


@behaviour
def on_exception(run: Run) -> dict[str, Any]:
    told: list[str] = []

    class Told(callbacks.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            told.append(str(exception))

    class Fails(User):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("the user's own")

    try:
        fitted(run, Fails(), callbacks=[Told()])
    except RuntimeError as error:
        told.append(str(error))
    return {"told": told}


class Stateful(User):
    """Keeps a number of its own in checkpoints."""

    count = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.count = checkpoint["count"]


@behaviour
def state_of_the_module_in_checkpoints(run: Run) -> dict[str, Any]:
    first, trainer = Stateful(), run.trainer()
    trainer.fit(first, run.loader())
    trainer.save_checkpoint(run.folder / "x.ckpt")
    second, again = Stateful(), run.trainer(max_epochs=2)
    again.fit(second, run.loader(), ckpt_path=str(run.folder / "x.ckpt"))
    return shown(again, second, counts=[first.count, second.count])


class Data(pl.LightningDataModule):
    """Loaders of a data module, with hooks of its own."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.of, self.called = run, []

    def setup(self, stage: str) -> None:
        self.called.append(f"setup {stage}")

    def train_dataloader(self) -> Any:
        return self.of.loader()

    def val_dataloader(self) -> Any:
        return self.of.validation(4, 24)

    test_dataloader = predict_dataloader = val_dataloader

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return {**batch, "input_ids": (batch["input_ids"] + 1) % 61}

    def teardown(self, stage: str) -> None:
        self.called.append(f"teardown {stage}")


@behaviour
def data_module(run: Run) -> dict[str, Any]:
    data, user, trainer = Data(run), User(), run.trainer()
    trainer.fit(user, datamodule=data)
    tested = trainer.test(user, datamodule=data, verbose=False)
    predicted = torch.cat(trainer.predict(user, datamodule=data))
    return shown(trainer, user, called=data.called, tested=tested, predicted=predicted)


@behaviour
def predict_several_loaders(run: Run) -> dict[str, Any]:
    class Several(User):
        def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:  # type: ignore[override]
            return self.logits(batch).argmax(-1)

    found = run.trainer().predict(Several(), [run.validation(4, 24), run.validation(3, 16)])
    return {"of loaders": [torch.cat(each) for each in found]}


@behaviour
def predict_from_a_checkpoint(run: Run) -> dict[str, Any]:
    user, trainer = User(), run.trainer()
    trainer.fit(user, run.loader())
    trainer.save_checkpoint(run.folder / "x.ckpt", weights_only=True)
    torch.manual_seed(5)
    found = run.trainer().predict(User(), run.validation(4, 24), ckpt_path=str(run.folder / "x.ckpt"))
    return {"tokens": torch.cat(found)}


@behaviour
def validate_from_a_checkpoint(run: Run) -> dict[str, Any]:
    trainer = run.trainer()
    trainer.fit(User(), run.loader())
    trainer.save_checkpoint(run.folder / "x.ckpt")
    torch.manual_seed(5)
    path = str(run.folder / "x.ckpt")
    return {"metrics": run.trainer().validate(User(), run.validation(4, 24), ckpt_path=path, verbose=False)}


@behaviour
def load_from_checkpoint(run: Run) -> dict[str, Any]:
    class Named(User):
        def __init__(self, lr: float = 0.02) -> None:
            super().__init__(lr)
            self.save_hyperparameters()
            self.configure_model()

    trainer = run.trainer()
    trainer.fit(Named(0.03), run.loader())
    trainer.save_checkpoint(run.folder / "x.ckpt")
    loaded = Named.load_from_checkpoint(run.folder / "x.ckpt")
    return {"lr": loaded.lr, "weights": {name: value.double() for name, value in weights(loaded).items()}}


@behaviour
def clipping_by_a_hook(run: Run) -> dict[str, Any]:
    class Clips(User):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    return fitted(run, Clips())


@behaviour
def clipping_by_torch(run: Run) -> dict[str, Any]:
    class Clips(User):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)))

    return fitted(run, Clips())


@behaviour
def warmup_by_a_hook(run: Run) -> dict[str, Any]:
    class Warms(User):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.005 * (self.trainer.global_step + 1)
            optimizer.step(closure=optimizer_closure)

    return fitted(run, Warms())


@behaviour
def log_in_a_callback(run: Run) -> dict[str, Any]:
    class Logs(callbacks.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_module.log("of_callback", outputs["loss"], prog_bar=True, logger=False)

        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
            pl_module.log("half", 0.5, sync_dist=True, batch_size=1)

    return fitted(run, validation=True, callbacks=[Logs()])


@behaviour
def manual_accumulation(run: Run) -> dict[str, Any]:
    class Manual(User):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            loss = self.loss(batch)
            self.manual_backward(loss / 2)
            self.losses.append(float(loss.detach()))
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()

    return full(run, 8, Manual(), max_epochs=2)


@behaviour
def no_optimizer(run: Run) -> dict[str, Any]:
    class Without(User):
        def configure_optimizers(self) -> None:  # type: ignore[override]
            return None

    return fitted(run, Without())


@behaviour
def limit_train_batches_of_zero(run: Run) -> dict[str, Any]:
    return fitted(run, validation=True, limit_train_batches=0)


@behaviour
def max_epochs_of_zero(run: Run) -> dict[str, Any]:
    return fitted(run, max_epochs=0)


@behaviour
def shuffled_loader_keeps_every_sample(run: Run) -> dict[str, Any]:
    class Reads(User):
        def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
            self.seen += batch["input_ids"][:, 0].tolist()
            return batch

    user, trainer = Reads(), run.trainer()
    trainer.fit(user, run.loader(data=Full(8), shuffle=True))
    everything = trainer.strategy.reduce(torch.tensor(float(sum(user.seen))), reduce_op="sum")
    return {"sum": float(everything) / (trainer.world_size // run.groups), "steps": trainer.global_step}


@behaviour
def numbers_of_batches(run: Run) -> dict[str, Any]:
    class Counts(User):
        def on_train_start(self) -> None:
            trainer = self.trainer
            self.seen.append(
                (trainer.num_training_batches, trainer.num_val_batches, trainer.estimated_stepping_batches)
            )

    return {"seen": fitted(run, Counts(), validation=True, max_epochs=2)["seen"]} if run.groups == 1 else {}
