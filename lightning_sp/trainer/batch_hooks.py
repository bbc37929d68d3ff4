"""`on_train_batch_start` that changes the batch: it has this rank's shard, so the preflight must run it too.

Elsewhere such hooks are not run in a trial, for what callbacks count and time cannot be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_sp.trainer.manual_optimization import tried_training_step


class HandedBatch:
    """The batch that hooks are handed; a class because it waits for them.

    An entry counts as changed that is another object, or that was written to in place.
    """

    def __init__(self) -> None:
        self._entries: dict[Any, tuple[Any, int]] = {}

    def note(self, batch: Any) -> Any:
        """Remember a batch before its hooks, and return it."""
        self._entries = _entries(batch)
        return batch

    def tried_step(self, batch: Any, batch_idx: int) -> Callable[..., Any]:
        """Return what a trial runs for training_step: after the hooks, if they have changed the batch."""
        before, now = self._entries, _entries(batch)
        same = before.keys() == now.keys() and all(
            now[name][0] is value and now[name][1] == version for name, (value, version) in before.items()
        )
        return tried_training_step if same else partial(_after_hooks, batch_idx)


def _entries(batch: Any) -> dict[Any, tuple[Any, int]]:
    if isinstance(batch, Mapping):
        items = [*batch.items()]
    elif isinstance(batch, (tuple, list)):
        items = [*enumerate(batch)]
    else:
        items = [(0, batch)]
    return {name: (value, _version(value)) for name, value in items}


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _after_hooks(batch_idx: int, strategy: Strategy, batch: Any, *others: Any) -> Any:
    module = strategy.lightning_module
    assert module is not None
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        if type(callback).__module__.partition(".")[0] not in ("lightning", "pytorch_lightning", "lightning_sp"):
            callback.on_train_batch_start(module.trainer, module, batch, batch_idx)
    module.on_train_batch_start(batch, batch_idx)
    return tried_training_step(strategy, batch, *others)
