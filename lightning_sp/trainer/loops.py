"""The Trainer's loops: which evaluates, none in inference mode, what a step is given, what is monitored; loggers and autocast switched off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor


def evaluation_loop(trainer: Trainer) -> Any:
    """Return the loop that validates, tests or predicts."""
    return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop


def evaluated_step(trainer: Trainer) -> str:
    """Return which evaluation is in progress; empty in training."""
    if trainer.predicting:
        return "predict"
    return ("test" if trainer.testing else "validation") if trainer.evaluating else ""


def forbid_inference_mode(trainer: Trainer) -> None:
    """FSDP2 fails at the training step after an inference_mode evaluation: inference tensors have no version counter."""
    for loop in (
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
        trainer.fit_loop.epoch_loop.val_loop,
    ):
        loop.inference_mode = False


def decided_by(trainer: Trainer) -> dict[str, Any]:
    """Return by what a fit decides whether a step follows a micro-batch, and whether another batch does; what a batch is for, and what is logged
    over all ranks.

    Of an evaluation the last two alone.
    """
    of_all = {
        "the stage that reads a batch": trainer.state.stage.value if trainer.state.stage is not None else "none",
        "logged with sync_dist=True": ", ".join(_names_over_ranks(trainer)),
    }
    if not trainer.training:
        return of_all
    loop = trainer.fit_loop
    return {
        "trainer.should_stop": trainer.should_stop,
        **of_all,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "max_steps": loop.epoch_loop.max_steps,
        "max_epochs": loop.max_epochs,
        "optimizer steps so far": trainer.global_step,
    }


def _names_over_ranks(trainer: Trainer) -> list[str]:
    """Return the names that steps so far have logged with sync_dist=True: other ones on a rank would be added to another's numbers."""
    results = trainer._results
    if results is None:
        return []
    synced = (each.meta for each in results.values() if each.meta.sync.should and not each.meta.sync.rank_zero_only)
    return sorted({meta.name for meta in synced})


def forget_loaders(trainer: Trainer) -> None:
    """Let the next run make its loaders anew: those that were made before any have not been given to the strategy."""
    fit = trainer.fit_loop
    for loop in (fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop._combined_loader = None


def skips_backward(trainer: Any) -> bool:
    """Return whether a training step is followed by no backward: an average's further epoch, for the statistics of its batch norms."""
    return bool(trainer.fit_loop._skip_backward)


def is_update(trainer: Trainer) -> bool:
    """Return whether an optimizer steps behind the micro-batch in progress; by hand it may behind each."""
    return not trainer.fit_loop._should_accumulate()


def begins_window(trainer: Trainer) -> bool:
    """Return whether the micro-batch in progress is the first of its optimizer step's."""
    return (trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1) % trainer.accumulate_grad_batches == 0


def of_batch(trainer: Trainer) -> dict[str, bool]:
    """Return of the batch that comes next whether it begins an optimizer step, or an evaluation after one, and whether it is one of training."""
    if trainer.state.fn != TrainerFn.FITTING:
        return {"begins": True, "trains": trainer.training}
    # The loop counts a batch when it has it, and so tells of the one before; that a batch is the last of an epoch it knows earlier.
    counted = trainer.fit_loop.epoch_loop._accumulated_batches_reached()
    return {"begins": counted if trainer.training else is_update(trainer), "trains": trainer.training}


def clipping(trainer: Trainer) -> dict[str, Any]:
    """Return how the Trainer clips gradients, by the names of its arguments."""
    return {
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
    }


def batch_index(module: LightningModule, batch_idx: int) -> tuple[int, ...]:
    """Return what training_step is given beside the batch: its index, if it asks for one."""
    return (batch_idx,) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else ()


class TriedLogger(DummyLogger):  # type: ignore[misc,unused-ignore]
    """A logger of a step that is tried.

    Attributes:
        take: is given the numbers that a step hands to its logger by itself, past `self.log`, by name; None where nobody asks.
    """

    take: Callable[[Mapping[Any, Any]], None] | None = None

    @property
    def experiment(self) -> Any:
        """What a logger's library would be given."""
        return _TriedExperiment(self)

    def log_metrics(self, metrics: Mapping[Any, Any], *_: Any, **__: Any) -> None:
        """Hand numbers on."""
        if self.take is not None:
            self.take(metrics)


class _TriedExperiment(_DummyExperiment):  # type: ignore[misc,unused-ignore]
    """Stands for TensorBoard's writer, a run of Weights & Biases and their kin: each method takes a name and a number, or a dict of these."""

    def __init__(self, logger: TriedLogger) -> None:
        self._logger = logger

    def __getattr__(self, _: str) -> Any:
        return self._call

    def _call(self, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], Mapping):
            self._logger.log_metrics(args[0])
        elif len(args) > 1 and isinstance(args[0], str):
            self._logger.log_metrics({args[0]: args[1]})


@contextmanager
def without_loggers(trainer: Trainer) -> Iterator[None]:
    """Give a step as many loggers as it has, which log nothing, and hand the numbers to whoever asks for them (`TriedLogger.take`)."""
    loggers, trainer.loggers = trainer.loggers, [TriedLogger() for _ in trainer.loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers


def names_of_evaluation(trainer: Trainer) -> list[str]:
    """Return the names of the numbers that the evaluation in progress has logged, as callbacks see them."""
    own = {each.meta.name for each in (trainer._results or {}).values()}
    return [name for name in trainer.callback_metrics if name.partition("/dataloader_idx_")[0] in own]


def sums_of(trainer: Trainer, value: Tensor) -> dict[str, str]:
    """Return the synchronized sums of the loop in progress that are a value so far: where each was logged, by name."""
    logged = (each for each in (trainer._results or {}).values() if each.is_tensor and each.meta.is_sum_reduction)
    return {each.meta.name: each.meta.fx for each in logged if each.meta.sync.should and bool(each.value == value)}


def sees_part(place: str | None) -> bool:
    """Return whether a method of the user's sees a rank's part of a batch, where steps do: other hooks have it whole."""
    return place is None or place.endswith("_step") or place in ("transfer_batch_to_device", "on_after_batch_transfer")


def monitored_names(trainer: Trainer) -> list[str]:
    """Return the names of the logged numbers by which callbacks and schedulers decide about a fit."""
    if trainer.state.fn != TrainerFn.FITTING:
        return []
    named = [getattr(each, "monitor", None) for each in trainer.callbacks]  # type: ignore[attr-defined]
    named += [each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau]
    return [each for each in named if isinstance(each, str)]


def trial_options(strategy: Strategy, of_hooks: Callable[[], Any]) -> dict[str, Any]:
    """Return what a trial of a step is told of the run: the numbers that decide about it, what switches autocast off, in training counters."""
    assert strategy.lightning_module is not None
    trainer = strategy.lightning_module.trainer
    found = {"monitored": monitored_names(trainer), "in_float32": without_autocast(strategy)}
    return {**found, "of_hooks": of_hooks()} if trainer.training else found


def without_autocast(strategy: Strategy) -> Callable[[], AbstractContextManager[None]] | None:
    """Return what switches the Trainer's autocast off for a while; None where its precision has none."""
    plugin = strategy.precision_plugin
    return partial(_with_precision, strategy, plugin) if isinstance(plugin, MixedPrecision) else None


@contextmanager
def _with_precision(strategy: Strategy, plugin: Precision) -> Iterator[None]:
    strategy.precision_plugin = Precision()
    try:
        yield
    finally:
        strategy.precision_plugin = plugin
