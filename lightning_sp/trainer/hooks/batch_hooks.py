"""`on_train_batch_start` and its kin that change the batch: a trial must run them too.

Elsewhere such hooks are not run in a trial, for what callbacks count and time cannot be put back.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_sp.batch_structure import entries_of

# Hooks between a backward and its update.
_BETWEEN = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)


class HandedBatch:
    """The batch that hooks are handed; a class because it waits for them.

    An entry counts as changed that is another object, or that was written to in place.
    """

    def __init__(self) -> None:
        self._entries: dict[Any, tuple[Any, int]] = {}
        self._instead: list[tuple[Any, Any]] = []

    def note(self, batch: Any) -> Any:
        """Remember a batch before its hooks, and return it."""
        self._entries = _entries(batch)
        self._instead = []
        return batch

    def replace(self, handed: Any, batch: Any) -> None:
        """Give the step another batch than its hooks were handed: in place where that can be, for later hooks."""
        if isinstance(handed, MutableMapping):
            handed.clear()
            handed.update(batch)
        elif isinstance(handed, list):
            handed[:] = batch
        elif hasattr(handed, "__dict__") and not isinstance(handed, (Tensor, tuple)):
            vars(handed).update(vars(batch))
        self._instead = [each for each in self._instead if each[0] is not handed] + [(handed, batch)]

    def instead_of(self, handed: Any) -> Any:
        """Return the batch that the step gets in the place of the one that its hooks are handed: itself, if there is no other."""
        return next((batch for each, batch in self._instead if each is handed), handed)

    @staticmethod
    def after_hooks(strategy: Any, hook: str, batch: Any, indices: tuple[int, ...]) -> Any:
        """Return a batch after the user's hooks of a step have had it."""
        return _after_hooks(_as_it_is, hook, indices, strategy, batch)

    def of_step(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what a step is called with, its batch first: that which is in the place of the one handed, if there is one."""
        return (self.instead_of(args[0]), *args[1:]) if args else args

    def tried(self, step: Callable[..., Any], hook: str, batch: Any, *indices: int) -> Callable[..., Any]:
        """Return what a trial runs for a step: after the hooks, if they have changed the batch.

        Args:
            step: given a strategy, a batch and what else the step asks for.
            hook: the name of those that have had the batch.
            batch: as they left it.
            indices: that they are given: the batch's, and the loader's where there are several.
        """
        return partial(_after_hooks, step, hook, indices) if self.is_changed(batch) else step

    def is_changed(self, batch: Any) -> bool:
        """Return whether hooks have changed the batch that they were handed."""
        if self.instead_of(batch) is not batch:
            return True
        before, now = self._entries, _entries(batch)
        return before.keys() != now.keys() or any(
            now[name][0] is not value or now[name][1] != version for name, (value, version) in before.items()
        )


def moves_batches(trainer: Trainer) -> bool:
    """Return whether the user moves batches to the device by a hook."""
    owners = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    return any(is_overridden("transfer_batch_to_device", each) for each in owners if each is not None)


def _entries(batch: Any) -> dict[Any, tuple[Any, int]]:
    entries = entries_of(batch)
    return {name: (value, _version(value)) for name, value in ({"": batch} if entries is None else entries).items()}


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def reads_before_backward(module: LightningModule) -> bool:
    """Return whether the user has a hook between a training step and its backward: it may read weights, or write to them."""
    owners = [module, *of_user(module.trainer)]
    return any(is_overridden(hook, each) for hook in ("on_before_zero_grad", "optimizer_zero_grad") for each in owners)


def of_user(trainer: Trainer) -> list[Any]:
    """Return the callbacks that are no library's."""
    libraries = ("lightning", "pytorch_lightning", "lightning_sp")
    return [each for each in trainer.callbacks if type(each).__module__.partition(".")[0] not in libraries]  # type: ignore[attr-defined]


def acts_at_batch_start(trainer: Trainer) -> bool:
    """Return whether code of the user's runs between a training batch's transfer and its step."""
    owners: list[Any] = [trainer.lightning_module, *of_user(trainer)]
    return any(is_overridden("on_train_batch_start", each) for each in owners)


def acts_before_updates(trainer: Trainer) -> bool:
    """Return whether code of the user's runs between a backward and its update: in a hook, or in a step that steps by hand."""
    module: Any = trainer.lightning_module
    owners = [module, *of_user(trainer)]
    return not module.automatic_optimization or any(is_overridden(hook, each) for each in owners for hook in _BETWEEN)


def _as_it_is(_: Any, batch: Any) -> Any:
    return batch


def _after_hooks(
    step: Callable[..., Any], hook: str, indices: tuple[int, ...], strategy: Strategy, batch: Any, *others: Any
) -> Any:
    module = strategy.lightning_module
    assert module is not None
    for callback in of_user(module.trainer):
        getattr(callback, hook)(module.trainer, module, batch, *indices)
    getattr(module, hook)(batch, *indices)
    handed: HandedBatch = strategy._handed  # type: ignore[attr-defined]
    return step(strategy, handed.instead_of(batch), *others)
