"""`self.log` in all its forms."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, SumMetric

from tests.trainer.behaviours.harness import BEHAVIOURS, Run, behaviour
from tests.trainer.behaviours.users import Batch, User, fitted, shown


class Logging(User):
    """Logs one number by given options, in training and in validation.

    Args:
        of: which: the "loss", which all ranks have; "rows" of the batch; "tokens" that are trained on; "half", a number of no batch.
        options: of `self.log`.
    """

    def __init__(self, of: str, **options: Any) -> None:
        super().__init__()
        self.of, self.options = of, options

    def number(self, batch: Batch, loss: Tensor) -> Any:
        if self.of == "loss":
            return loss.detach()
        if self.of == "rows":
            return float(len(batch["input_ids"]))
        if self.of == "tokens":
            return batch["input_ids"].numel() * 1.0
        if self.of == "targets":
            return batch["shift_labels"].ne(-100).sum().double()
        return 0.5

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("number", self.number(batch, loss), **self.options)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append({n: float(v) for n, v in self.trainer.callback_metrics.items() if "number" in n})

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log(
            "val_number", self.number(batch, self.loss(batch)), **{**self.options, "on_step": None, "on_epoch": None}
        )


def _register(name: str, of: str, **options: Any) -> None:
    def run_it(run: Run) -> dict[str, Any]:
        return fitted(run, Logging(of, **options), validation=True)

    BEHAVIOURS[name] = run_it


for _of in ("loss", "rows", "tokens", "targets", "half"):
    for _fx in ("sum", "mean", "max", "min"):
        _register(f"log {_of} {_fx} synced", _of, reduce_fx=_fx, sync_dist=True, on_step=True, on_epoch=True)
        if _of in ("loss", "rows", "half"):
            _register(f"log {_of} {_fx}", _of, reduce_fx=_fx, on_step=True, on_epoch=True)
_register("log with batch_size", "loss", batch_size=3, on_epoch=True)
_register("log with batch_size synced", "loss", batch_size=3, on_epoch=True, sync_dist=True)
_register("log on rank zero", "loss", rank_zero_only=True)


class Epochs(User):
    """Logs in hooks at the end of epochs."""

    def on_train_epoch_end(self) -> None:
        self.log("epoch_sum", float(len(self.losses)), reduce_fx="sum", sync_dist=True)
        self.log("epoch_loss", self.losses[-1], reduce_fx="sum", sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_epoch", 0.3, reduce_fx="sum", sync_dist=True)


@behaviour
def log_at_the_end_of_an_epoch(run: Run) -> dict[str, Any]:
    return fitted(run, Epochs(), validation=True)


class Metered(User):
    """Logs torchmetrics objects of the loss, in training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.most, self.total, self.of_steps = MeanMetric(), MaxMetric(), MeanMetric(), MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.of_steps(loss.detach())
        self.log("metric", self.of_steps, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.mean.update(loss)
        self.most.update(loss)
        self.log("val_mean", self.mean)
        self.log("val_most", self.most)


@behaviour
def torchmetrics_logged(run: Run) -> dict[str, Any]:
    answer = fitted(run, Metered(), validation=True)
    # They add up in float32.
    answer["metrics"] = {n: round(v, 5) for n, v in answer["metrics"].items()}
    return answer


class Counting(User):
    """Counts tokens by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = SumMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.tokens(batch["input_ids"].numel())
        self.log("tokens", self.tokens, on_epoch=True)
        return super().training_step(batch, batch_idx)


@behaviour
def torchmetrics_counts_tokens(run: Run) -> dict[str, Any]:
    return fitted(run, Counting())


@behaviour
def log_dict(run: Run) -> dict[str, Any]:
    class Dict(User):
        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.log_dict({"a": loss, "b": 2 * loss}, sync_dist=True, batch_size=1)
            self.log_dict({"c": loss}, sync_dist=True, reduce_fx="sum")

    return fitted(run, Dict(), validation=True)


@behaviour
def test_and_validate_return_metrics(run: Run) -> dict[str, Any]:
    user, trainer = User(), run.trainer()
    trainer.fit(user, run.loader())
    validated = trainer.validate(user, run.validation(6, 24), verbose=False)
    tested = trainer.test(user, run.validation(4, 24), verbose=False)
    return shown(trainer, user, validated=validated, tested=tested)
