"""What of Lightning cannot work on sharded parameters or parts of sequences: refused by name before the model is set up.

Equal on all ranks, so no collective is needed. What is not named here is honoured; `docs/lightning.md` has both lists.
"""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.plugins import DeepSpeedPrecision, FSDPPrecision, TorchCheckpointIO
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_sp.config import Degrees, StrategyConfig, resolve_degrees
from lightning_sp.errors import SequenceParallelError

PRECISIONS = ("64-true", "32-true", "bf16-true", "bf16-mixed")
_STEPS = {
    TrainerFn.FITTING: ("training_step", "validation_step"),
    TrainerFn.VALIDATING: ("validation_step",),
    TrainerFn.TESTING: ("test_step",),
    TrainerFn.PREDICTING: ("predict_step",),
}


def check_precision(precision: str) -> None:
    """Refuse a precision that needs more than each rank's own numbers."""
    if precision not in PRECISIONS:
        raise SequenceParallelError(
            f"precision={precision!r} is not supported: float16 needs a loss scale that all ranks share; use one of {', '.join(PRECISIONS)}"
        )


def check_trainer_features(trainer: Trainer, module: LightningModule, config: StrategyConfig) -> None:
    """Refuse by name what is known to break, or what would be dropped.

    Raises:
        SequenceParallelError: an option, a callback, a plugin, a hook or a step of Lightning that cannot be carried.
    """
    _check_plugins(trainer, config)
    precision = trainer.precision
    if config.fp8 and str(precision).endswith("-mixed") and trainer.strategy.root_device.type != "cuda":
        raise SequenceParallelError(
            f"fp8={config.fp8!r} with precision={precision!r} on {trainer.strategy.root_device.type} ranks: torchao's layers follow a GPU's "
            "autocast alone; use precision='bf16-true' or '32-true'"
        )
    degrees = resolve_degrees(config, trainer.world_size)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        _check_counts(callback, degrees)
    for name in _STEPS.get(trainer.state.fn, ()) if trainer.state.fn is not None else ():
        if is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True):
            raise SequenceParallelError(
                f"{name}(dataloader_iter) fetches its batches itself, so they cannot be split over {trainer.world_size} ranks before: it is not "
                f"supported; take a batch instead, {name}(batch, batch_idx)"
            )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    for callback in list(trainer.callbacks):  # type: ignore[attr-defined]
        _check_callback(callback, trainer)
    _check_after_backward(trainer, module)
    if config.optimizer_in_backward:
        _check_optimizer_in_backward(trainer, module)
    seconds = getattr(trainer, "_val_check_time_interval", None)
    if seconds is not None and trainer.world_size > 1:
        raise SequenceParallelError(
            f"val_check_interval of {seconds:g} seconds: each of {trainer.world_size} ranks would read a clock of its own, and some would "
            "validate while others train; give a number of batches, or a fraction of an epoch"
        )


def given_checkpoint_io(strategy: Any) -> Any:
    """Return the CheckpointIO plugin that the user gave, None for Lightning's default."""
    return None if type(strategy._checkpoint_io) in (type(None), TorchCheckpointIO) else strategy._checkpoint_io


def syncs_batch_norm(module: Any) -> bool:
    """Return whether a module's Trainer was given `sync_batchnorm=True`, or its plugin."""
    trainer = getattr(module, "_trainer", None)
    return trainer is not None and getattr(trainer.strategy, "_layer_sync", None) is not None


def _check_plugins(trainer: Trainer, config: StrategyConfig) -> None:
    strategy: Any = trainer.strategy
    io, layer_sync = given_checkpoint_io(strategy), getattr(strategy, "_layer_sync", None)
    if io is not None and config.save_distributed_checkpoint:
        raise SequenceParallelError(
            f"the plugin {type(io).__name__} would write no checkpoint: with save_distributed_checkpoint=True each of {trainer.world_size} "
            "ranks writes its own part; SequenceParallelStrategy(save_distributed_checkpoint=False) hands it whole checkpoints"
        )
    if layer_sync is not None and type(layer_sync) is not TorchSyncBatchNorm:
        raise SequenceParallelError(
            f"the plugin {type(layer_sync).__name__} is not asked: it would replace layers by ones that know nothing of "
            f"{trainer.world_size} ranks' parts of a sequence; sync_batchnorm=True has batch norm over all data-parallel groups"
        )
    if isinstance(strategy.precision_plugin, (FSDPPrecision, DeepSpeedPrecision)):
        raise SequenceParallelError(
            f"the plugin {type(strategy.precision_plugin).__name__} is for another strategy, which does what it leaves out: give "
            f"Trainer(precision={str(strategy.precision_plugin.precision)!r})"
        )


def _check_counts(callback: Any, degrees: Degrees) -> None:
    """Refuse callbacks that count or write what each rank holds, where that is not one process' part."""
    dp, sp = degrees.data_parallel_size, degrees.sequence_parallel_size
    if isinstance(callback, callbacks.ThroughputMonitor) and sp > 1:
        raise SequenceParallelError(
            f"Lightning's ThroughputMonitor counts the samples of every rank, and sequence_parallel_size={sp} ranks share each: it would report "
            f"{sp} times too many; use lightning_sp.callbacks.ThroughputMonitor"
        )
    if isinstance(callback, callbacks.BasePredictionWriter) and dp > 1:
        raise SequenceParallelError(
            f"{type(callback).__name__} writes what each rank predicts, with fillers where data_parallel_size={dp} ranks get other numbers of "
            "batches: write what trainer.predict returns (each sample once, in order), or use data_parallel_size=1"
        )


def _check_callback(callback: Any, trainer: Trainer) -> None:
    """Refuse a callback that cannot work on shards, or on ranks that act by themselves."""
    name, world, strategy = type(callback).__name__, trainer.world_size, cast(Any, trainer.strategy)
    if isinstance(callback, callbacks.ModelPruning):
        raise SequenceParallelError(
            f"the callback {name} ranks the weights of whole tensors, and each of {world} ranks holds a shard of every parameter: prune the "
            "exported model (lightning_sp.export_checkpoint), or train a pruned one"
        )
    if isinstance(callback, callbacks.GradientAccumulationScheduler) and callback.going_to_accumulate_grad_batches():
        raise SequenceParallelError(
            f"GradientAccumulationScheduler({callback.scheduling}) changes the global batch during the run, by which the order of samples is "
            "cut: give one accumulate_grad_batches to the Trainer"
        )
    if strategy.config.asynchronous_checkpoints is True and getattr(callback, "save_last", None) == "link":
        raise SequenceParallelError(
            f"asynchronous_checkpoints=True with {name}(save_last='link'): the link would lead to a checkpoint that is not complete; use "
            "save_last=True, or leave asynchronous_checkpoints='auto'"
        )
    saves = getattr(callback, "save_on_exception", False) or isinstance(callback, callbacks.OnExceptionCheckpoint)
    if saves and world > 1:
        trainer.callbacks.remove(callback)  # type: ignore[attr-defined]  # it would answer this very refusal by a save
        raise SequenceParallelError(
            f"{name} would save when an exception is raised: {world} ranks write a checkpoint together, and an exception may be one rank's "
            "alone, which would wait for the others; save every n steps: ModelCheckpoint(every_n_train_steps=...)"
        )


def _check_after_backward(trainer: Trainer, module: LightningModule) -> None:
    """Refuse a look at gradients before the micro-batches of a window are weighed by their tokens."""
    accumulation = trainer.accumulate_grad_batches
    owners = [module, *trainer.callbacks]  # type: ignore[attr-defined]
    named = [type(each).__name__ for each in owners if is_overridden("on_after_backward", each)]
    if accumulation > 1 and named and module.automatic_optimization:
        raise SequenceParallelError(
            f"{named[0]}.on_after_backward with accumulate_grad_batches={accumulation}: the gradients of {accumulation} micro-batches are "
            "summed over the ranks, and divided by the tokens of all, after the last of them; use on_before_optimizer_step instead"
        )


def _check_optimizer_in_backward(trainer: Trainer, module: LightningModule) -> None:
    """Refuse what needs the gradients of all parameters at once, beside a step that frees them as they come."""
    given, accumulation, clips = (
        "optimizer_in_backward=True with",
        trainer.accumulate_grad_batches,
        trainer.gradient_clip_val,
    )
    instead = "leave optimizer_in_backward=False"
    if not module.automatic_optimization:
        raise SequenceParallelError(
            f"{given} manual optimization: when the optimizer steps is the step's own affair; {instead}"
        )
    if accumulation > 1:
        raise SequenceParallelError(
            f"{given} accumulate_grad_batches={accumulation}: the gradients of {accumulation} micro-batches are added up before the step, so "
            f"all of them are in memory; give larger batches, or {instead}"
        )
    if clips or is_overridden("configure_gradient_clipping", module):
        what = f"gradient_clip_val={clips}" if clips else f"{type(module).__name__}.configure_gradient_clipping"
        raise SequenceParallelError(
            f"{given} {what}: gradients are clipped when all of them are known, and here the first are freed before the last come; {instead}, "
            "or use an optimizer that bounds its own steps"
        )
    if is_overridden("optimizer_zero_grad", module):
        raise SequenceParallelError(
            f"{given} {type(module).__name__}.optimizer_zero_grad: gradients are freed as weights are stepped, and none is left to zero; leave "
            f"the hook out, or {instead}"
        )
    for hook in ("on_after_backward", "on_before_optimizer_step"):
        if named := [type(each).__name__ for each in (module, *trainer.callbacks) if is_overridden(hook, each)]:  # type: ignore[attr-defined]
            raise SequenceParallelError(
                f"{given} {named[0]}.{hook}: it would see no gradients, which are freed in the backward; look at one as it comes "
                f"(parameter.register_post_accumulate_grad_hook in on_fit_start), or {instead}"
            )
