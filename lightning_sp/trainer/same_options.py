"""Options that every rank's script gives for itself, and that must be alike: the Trainer's, the strategy's, those of some callbacks; torch's
own, and the versions of what ranks run.

A script that reads a rank's own environment or host may give each rank another one. Ranks would then step, validate or save at other times and
wait for each other; or, with another `gradient_clip_val`, each would scale its part of a gradient by its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any

import lightning
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.config import StrategyConfig
from lightning_sp.errors import SequenceParallelError

_OF_TRAINER = (
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "fast_dev_run",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "reload_dataloaders_every_n_epochs",
    "barebones",
)
# What decides when ranks save, stop or speak to each other together. Where a checkpoint goes, rank 0 says. Others a rank may have alone: a
# progress bar, a look at its own device.
_OF_CALLBACKS: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (
        callbacks.ModelCheckpoint,
        ("monitor", "mode", "save_top_k", "save_last", "save_weights_only", "_every_n_train_steps", "_every_n_epochs"),
    ),
    (
        callbacks.EarlyStopping,
        ("monitor", "mode", "patience", "min_delta", "stopping_threshold", "divergence_threshold"),
    ),
    (callbacks.Timer, ("_duration", "_interval")),
    (callbacks.StochasticWeightAveraging, ("_swa_epoch_start", "_swa_lrs", "_annealing_epochs", "_annealing_strategy")),
    (callbacks.WeightAveraging, ()),
    (callbacks.BaseFinetuning, ()),
    (callbacks.LearningRateFinder, ()),
)


def check_same_options(trainer: Any, config: StrategyConfig, group: ProcessGroup | None) -> None:
    """Refuse a run whose ranks were given other options, and where Lightning reads its checkpoint one that some ranks resume, and others begin.

    Every rank must call it.

    Args:
        trainer: of the run, before its loops begin.
        config: the strategy's options.
        group: the world, on a backend for host objects.

    Communicates: the options, as text, once.

    Raises:
        SequenceParallelError: with the options that differ.
    """
    if comm.size_of(group or comm.world()) == 1:
        return
    own = {name: _text(value) for name, value in _options(trainer, config)}
    if lines := comm.told_differences(comm.gather_objects(own, group)):
        raise SequenceParallelError(
            f"ranks were given other options: {lines}: ranks would step, stop or save at other times, or by other "
            "numbers; make them of what is alike on all (not of a rank, a host or a clock)"
        )
    _agree_on_resume(trainer, group)


def _agree_on_resume(trainer: Any, group: ProcessGroup | None) -> None:
    """Let ranks agree on whether a path was given, in one gather, where Lightning reads the checkpoint."""
    connector = trainer._checkpoint_connector
    start = type(connector).resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        paths = comm.gather_objects(None if not checkpoint_path else str(checkpoint_path), group)
        if None in paths and any(paths):
            given = comm.told_differences([{"ckpt_path": "None" if each is None else each} for each in paths])
            raise SequenceParallelError(
                f"{given}: some ranks would resume, and others begin; a host may not see another's files (os.path.exists, ckpt_path='last'): "
                "keep checkpoints where all hosts see them, or let rank 0 decide and broadcast the path"
            )
        return start(connector, checkpoint_path, *args, **kwargs)

    connector.resume_start = resume_start


def _text(value: Any) -> str:
    """Return a value as text; of an object its class, for its own text may hold an address."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(key)}: {_text(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    plain = value is None or isinstance(value, (bool, int, float, str, timedelta))
    return repr(value) if plain else type(value).__name__


def _options(trainer: Any, config: StrategyConfig) -> Iterator[tuple[str, Any]]:
    for name in _OF_TRAINER:
        yield name, getattr(trainer, name, None)
    for field in fields(config):
        yield f"{field.name} of the strategy", getattr(config, field.name)
    yield from _of_process()
    yield from _of_module(trainer)
    for kind, names in _OF_CALLBACKS:
        for number, callback in enumerate(each for each in trainer.callbacks if isinstance(each, kind)):
            yield f"{kind.__name__} {number}", type(callback).__name__
            for name in names:
                yield f"{name.lstrip('_')} of {kind.__name__} {number}", getattr(callback, name, None)


def _of_module(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Give what decides how a fit's loops go, past the Trainer's arguments."""
    if trainer.state.fn != TrainerFn.FITTING:
        return
    yield "automatic_optimization of the LightningModule", trainer.lightning_module.automatic_optimization
    loaders = trainer.fit_loop.epoch_loop.val_loop._data_source.instance
    yield "whether there is a validation", trainer.enable_validation
    yield "the number of validation loaders", len(loaders) if isinstance(loaders, (list, tuple)) else 1


def _of_process() -> Iterator[tuple[str, Any]]:
    """Give what decides about this process' numbers, past any Trainer."""
    yield "the version of torch", torch.__version__
    yield "the version of lightning", lightning.__version__
    yield "torch.get_default_dtype()", str(torch.get_default_dtype())
    yield "torch.are_deterministic_algorithms_enabled()", torch.are_deterministic_algorithms_enabled()
    for name in ("cuda.matmul", "mkldnn.matmul"):  # what torch.set_float32_matmul_precision writes to
        yield f"torch.backends.{name}.fp32_precision", _fp32_precision(name)


def _fp32_precision(name: str) -> Any:
    backend: Any = torch.backends
    for part in name.split("."):
        backend = getattr(backend, part, None)
    return getattr(backend, "fp32_precision", None)
