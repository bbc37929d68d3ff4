"""How long a run's checkpoints are kept. How many are, `ModelCheckpoint(save_top_k=...)` says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_sp.checkpoint import remove_expired
from lightning_sp.errors import SequenceParallelError
from lightning_sp.strategy import SequenceParallelStrategy
from lightning_sp.trainer.features import given_checkpoint_io

# What a metric's value is in a name.
_NUMBER = r"(?:[-+.,_% \deE]+|-?nan|-?inf)"


class CheckpointRetention(Callback):
    """Delete checkpoints that are older than the newest one by more than an age, whenever a newer one is complete.

    It looks into the folders of the Trainer's ModelCheckpoint callbacks, at what lies in them itself and has a name that one of them gives, of
    an earlier run too. These stay in any case: the newest complete one, what is being written, each ModelCheckpoint's best and last, the one
    that the fit goes on from, and what a link leads to. With ``ModelCheckpoint(save_top_k=-1)`` the age alone decides; with another number,
    whichever comes first.

    Args:
        max_age: ``timedelta(days=2)``, or its keywords: ``{"days": 2}``.

    Raises:
        SequenceParallelError: an age that is no time or not above 0; no ModelCheckpoint; another strategy, or a CheckpointIO of the user's,
            of which it is not known when a checkpoint is complete.
    """

    def __init__(self, max_age: timedelta | Mapping[str, float]) -> None:
        try:
            self.max_age = max_age if isinstance(max_age, timedelta) else timedelta(**max_age)
        except TypeError as error:
            raise SequenceParallelError(
                f"CheckpointRetention(max_age={max_age!r}): a timedelta, or its keywords (weeks, days, hours, minutes, seconds), as "
                '{"days": 2}'
            ) from error
        if self.max_age <= timedelta(0):
            raise SequenceParallelError(
                f"CheckpointRetention(max_age={self.max_age}) would keep the newest checkpoint alone, and a longer time keeps more: give one "
                "above 0, or ModelCheckpoint(save_top_k=1)"
            )

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have the strategy say when a checkpoint is complete."""
        if stage != "fit":
            return
        strategy: Any = trainer.strategy
        name = type(strategy).__name__
        if not isinstance(strategy, SequenceParallelStrategy) or given_checkpoint_io(strategy) is not None:
            with_io = f" with {type(strategy.checkpoint_io).__name__}"
            raise SequenceParallelError(
                f"CheckpointRetention deletes when a newer checkpoint is complete, which {name}{with_io} does not say: use the "
                "sequence_parallel strategy without a CheckpointIO plugin, or leave the callback out"
            )
        if not _model_checkpoints(trainer):
            raise SequenceParallelError(
                f"CheckpointRetention(max_age={self.max_age}) deletes in ModelCheckpoint's folder, and this Trainer has 0 ModelCheckpoint "
                "callbacks: add one, or leave this out"
            )
        strategy.call_after_saves(self.remove_expired)

    def remove_expired(self, trainer: Trainer) -> None:
        """Delete what has become too old; on rank 0."""
        given: Any = trainer
        if not trainer.is_global_zero or self not in given.callbacks:
            return
        savers = _model_checkpoints(trainer)
        keep = [
            path for each in savers for path in (each.best_model_path, each.last_model_path, given.ckpt_path) if path
        ]
        for folder in sorted({str(each.dirpath) for each in savers if each.dirpath}):
            try:
                remove_expired(folder, self.max_age, keep, partial(is_of, savers))
            except OSError as error:
                rank_zero_warn(
                    f"CheckpointRetention: what is older than {self.max_age} in {folder} could not all be deleted: "
                    f"{type(error).__name__}: {error}"
                )


def is_of(savers: list[ModelCheckpoint], name: str) -> bool:
    """Return whether a file or folder has a name that one of the callbacks gives: its template's or its last one's, with a version."""
    templates = [(each, t) for each in savers for t in (each.filename or "{epoch}-{step}", each.CHECKPOINT_NAME_LAST)]
    return any(
        re.fullmatch(f"{_pattern(template, each)}(-v\\d+)?{re.escape(each.FILE_EXTENSION)}", name)
        for each, template in templates
    )


def _pattern(template: str, saver: ModelCheckpoint) -> str:
    parts = re.split(r"(\{[^}]*\})", template.rpartition("/")[2])
    fields = [
        f"{re.escape(re.split('[{:}]', each)[1])}=" if saver.auto_insert_metric_name else "" for each in parts[1::2]
    ]
    return "".join(
        f"{re.escape(text)}{field}"
        for text, field in zip(parts[::2], [*(f + _NUMBER for f in fields), ""], strict=True)
    )


def _model_checkpoints(trainer: Any) -> list[ModelCheckpoint]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
