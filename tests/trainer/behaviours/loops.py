"""The Trainer's loops: limits, accumulation, clipping, schedulers, when it validates and ends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.trainer.behaviours.harness import Run, behaviour
from tests.trainer.behaviours.users import Batch, Full, User, fitted, full, shown


class Watched(User):
    """Remembers when it was validated."""

    def on_validation_end(self) -> None:
        self.seen.append((self.trainer.global_step, round(float(self.trainer.callback_metrics.get("val_loss", -1)), 9)))


@behaviour
def sanity_check(run: Run) -> dict[str, Any]:
    return fitted(run, Watched(), validation=True, num_sanity_val_steps=2)


@behaviour
def overfit_batches(run: Run) -> dict[str, Any]:
    return fitted(run, Watched(), validation=True, overfit_batches=2, max_epochs=2)


@behaviour
def overfit_fraction(run: Run) -> dict[str, Any]:
    return fitted(run, Watched(), validation=True, overfit_batches=0.5, max_epochs=2)


@behaviour
def fast_dev_run(run: Run) -> dict[str, Any]:
    return fitted(run, Watched(), validation=True, fast_dev_run=2)


@behaviour
def accumulation(run: Run) -> dict[str, Any]:
    return full(run, 8, accumulate_grad_batches=2, max_epochs=2)


@behaviour
def accumulation_of_other_counts(run: Run) -> dict[str, Any]:
    return fitted(run, size=8, accumulate_grad_batches=2, max_epochs=2)


@behaviour
def accumulation_short_last_window(run: Run) -> dict[str, Any]:
    return full(run, 10, accumulate_grad_batches=2, max_epochs=2)


@behaviour
def accumulation_scheduled(run: Run) -> dict[str, Any]:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    return full(run, 8, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})], max_epochs=3)


@behaviour
def clip_by_norm(run: Run) -> dict[str, Any]:
    return fitted(run, gradient_clip_val=0.1)


@behaviour
def clip_by_value(run: Run) -> dict[str, Any]:
    return fitted(run, gradient_clip_val=0.001, gradient_clip_algorithm="value")


@behaviour
def clip_with_accumulation(run: Run) -> dict[str, Any]:
    return full(run, 8, gradient_clip_val=0.1, accumulate_grad_batches=2)


class Manual(User):
    """Two optimizers by hand, each over half of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        halves = [p for n, p in named if ".layers." in n], [p for n, p in named if ".layers." not in n]
        optimizers = [torch.optim.AdamW(halves[0], lr=0.02), torch.optim.SGD(halves[1], lr=0.1)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        second.step()
        self.losses.append(float(loss.detach()))

    def on_train_epoch_end(self) -> None:
        for each in self.lr_schedulers():
            each.step()


@behaviour
def several_optimizers_by_hand(run: Run) -> dict[str, Any]:
    return fitted(run, Manual(), max_epochs=2)


class Scheduled(User):
    """A learning-rate schedule of one kind."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.kind, self.options = kind, options

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        if self.kind == "plateau":
            scheduler: Any = schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5)
        elif self.kind == "one cycle":
            scheduler = schedulers.OneCycleLR(optimizer, 0.05, int(self.trainer.estimated_stepping_batches))
        else:
            scheduler = schedulers.StepLR(optimizer, 1, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.options}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])


@behaviour
def schedule_by_step(run: Run) -> dict[str, Any]:
    return fitted(run, Scheduled("step", interval="step", frequency=2), max_epochs=2)


@behaviour
def schedule_by_epoch(run: Run) -> dict[str, Any]:
    return fitted(run, Scheduled("step"), max_epochs=3)


@behaviour
def schedule_one_cycle(run: Run) -> dict[str, Any]:
    return fitted(run, Scheduled("one cycle", interval="step"), max_epochs=2)


@behaviour
def schedule_plateau(run: Run) -> dict[str, Any]:
    return fitted(run, Scheduled("plateau", monitor="val_loss"), validation=True, max_epochs=3)


@behaviour
def schedule_plateau_by_step(run: Run) -> dict[str, Any]:
    return fitted(run, Scheduled("plateau", monitor="train_loss", interval="step"), max_epochs=2)


class Estimating(User):
    """Asks how many steps there will be, in three places."""

    def setup(self, stage: str) -> None:
        self.seen.append(("setup", int(self.trainer.estimated_stepping_batches)))

    def configure_model(self) -> None:
        self.seen.append(("configure_model", int(self.trainer.estimated_stepping_batches)))
        torch.manual_seed(4)  # to count them starts loaders, which draw a number each where they are torch's
        super().configure_model()

    def configure_optimizers(self) -> Any:
        self.seen.append(("configure_optimizers", int(self.trainer.estimated_stepping_batches)))
        return super().configure_optimizers()


@behaviour
def estimated_stepping_batches(run: Run) -> dict[str, Any]:
    user, trainer = Estimating(), run.trainer(max_epochs=3, accumulate_grad_batches=2)
    trainer.fit(user, run.loader(data=Full(8)))
    return shown(trainer, user, seen=user.seen)


class Rows(IterableDataset):
    """A stream of samples."""

    def __init__(self, size: int) -> None:
        self.data = Full(size)

    def __iter__(self) -> Any:
        return (self.data[i] for i in range(len(self.data)))


@behaviour
def iterable_dataset(run: Run) -> dict[str, Any]:
    user, trainer = User(), run.trainer(max_epochs=2)
    trainer.fit(user, run.loader(data=Rows(8)))
    return shown(trainer, user)


@behaviour
def limits(run: Run) -> dict[str, Any]:
    return fitted(run, Watched(), validation=True, limit_train_batches=3, limit_val_batches=1, max_epochs=2)


@behaviour
def limits_by_fraction(run: Run) -> dict[str, Any]:
    return fitted(run, Watched(), validation=True, limit_train_batches=0.5, limit_val_batches=0.5, max_epochs=2)


@behaviour
def max_steps(run: Run) -> dict[str, Any]:
    return fitted(run, Watched(), max_steps=6, max_epochs=-1)


@behaviour
def min_steps(run: Run) -> dict[str, Any]:
    return fitted(run, Watched(), min_steps=6, max_epochs=1)


@behaviour
def max_time(run: Run) -> dict[str, Any]:
    return fitted(run, max_time={"hours": 1})


@behaviour
def max_time_zero(run: Run) -> dict[str, Any]:
    return fitted(run, max_time=timedelta(microseconds=1))


@behaviour
def val_check_interval_int(run: Run) -> dict[str, Any]:
    return fitted(run, Watched(), validation=True, val_check_interval=2, max_epochs=2)


@behaviour
def val_check_interval_float(run: Run) -> dict[str, Any]:
    return fitted(run, Watched(), validation=True, val_check_interval=0.5)


@behaviour
def val_check_interval_over_epochs(run: Run) -> dict[str, Any]:
    return fitted(run, Watched(), validation=True, val_check_interval=3, check_val_every_n_epoch=None, max_epochs=3)


@behaviour
def should_stop(run: Run) -> dict[str, Any]:
    class Stops(User):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = batch_idx == 1

    return fitted(run, Stops(), max_epochs=3)


@behaviour
def step_of_none(run: Run) -> dict[str, Any]:
    class Skips(User):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    return fitted(run, Skips())


@behaviour
def detect_anomaly(run: Run) -> dict[str, Any]:
    return fitted(run, detect_anomaly=True)


@behaviour
def deterministic(run: Run) -> dict[str, Any]:
    try:
        return fitted(run, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


@behaviour
def barebones(run: Run) -> dict[str, Any]:
    user = User()
    from lightning.pytorch import Trainer

    from lightning_sp import SequenceParallelStrategy

    chosen: Any = "auto" if run.strategy is None else SequenceParallelStrategy(**run.strategy)
    trainer = Trainer(
        barebones=True, accelerator="cpu", devices=run.world, strategy=chosen, max_epochs=1, precision="64-true"
    )
    trainer.fit(user, run.loader())
    return shown(trainer, user)


@behaviour
def inference_mode_off(run: Run) -> dict[str, Any]:
    return fitted(run, Watched(), validation=True, inference_mode=False)


@behaviour
def dict_output(run: Run) -> dict[str, Any]:
    class Dicts(User):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "more": torch.ones(2)}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append((float(outputs["loss"]), outputs["more"].tolist()))

    return fitted(run, Dicts())


@behaviour
def reload_dataloaders(run: Run) -> dict[str, Any]:
    class Reloads(User):
        def train_dataloader(self) -> Any:
            self.seen.append(self.trainer.current_epoch)
            return run.loader(4 + 2 * self.trainer.current_epoch)

    user, trainer = Reloads(), run.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(user)
    return shown(trainer, user, seen=user.seen)


@behaviour
def several_validation_loaders(run: Run) -> dict[str, Any]:
    class Several(User):
        def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
            self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=1)
            self.log("summed", self.loss(batch), sync_dist=True, reduce_fx="sum", batch_size=1)

    user, trainer = Several(), run.trainer()
    trainer.fit(user, run.loader(), [run.validation(4, 24), run.validation(6, 16)])
    return shown(trainer, user)


@behaviour
def combined_loader_in_validation(run: Run) -> dict[str, Any]:
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    class Both(User):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
            self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=1)

    user, trainer = Both(), run.trainer()
    loaders = CombinedLoader([run.validation(4, 24), run.validation(6, 16)], "sequential")
    trainer.fit(user, run.loader(), loaders)
    return shown(trainer, user)


@behaviour
def combined_loader_in_training(run: Run) -> dict[str, Any]:
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    class Both(User):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return sum(super(Both, self).training_step(each, batch_idx) for each in batch.values())

    user, trainer = Both(), run.trainer()
    trainer.fit(user, CombinedLoader({"a": run.loader(4, 24), "b": run.loader(4, 16)}, "max_size_cycle"))
    return shown(trainer, user)


@behaviour
def combined_loader_sequential_in_training(run: Run) -> dict[str, Any]:
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    class One(User):
        def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:  # type: ignore[override]
            batch = batch[0] if isinstance(batch, (tuple, list)) else batch
            return super().training_step(batch, batch_idx)

    user, trainer = One(), run.trainer()
    trainer.fit(user, CombinedLoader([run.loader(4, 24), run.loader(4, 16)], "sequential"))
    return shown(trainer, user)


@behaviour
def precision_bf16_mixed(run: Run) -> dict[str, Any]:
    answer = fitted(run, precision="bf16-mixed", max_steps=2)
    return {"dtypes": sorted({str(v.dtype) for v in answer["weights"].values()}), "steps": answer["steps"]}


@behaviour
def precision_32(run: Run) -> dict[str, Any]:
    answer = fitted(run, precision="32-true", max_steps=2)
    return {"losses": [round(each, 4) for each in answer["losses"]]}


@behaviour
def precision_16_mixed(run: Run) -> dict[str, Any]:
    return {"steps": fitted(run, precision="16-mixed", max_steps=2)["steps"]}  # bf16-mixed on a CPU, as Lightning says
