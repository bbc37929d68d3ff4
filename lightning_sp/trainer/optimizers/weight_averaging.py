"""Lightning's callbacks that average weights, on shards: `WeightAveraging`, `EMAWeightAveraging` and `StochasticWeightAveraging`.

They copy the LightningModule in their `setup`, when no parameter is sharded and ranks may hold other weights or none. Here the copy waits
until the model is laid over the ranks, and holds each rank's shards alone: an average costs a rank its part of the parameters. Its dtypes
are those that the callback would have met, before the Trainer's precision changed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_sp.checkpoint import sharded_like, sharded_state
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parameter_names import by_user_name, user_name

# Newer versions of Lightning alone have the second, and its EMA.
_CLASSES: tuple[Any, ...] = tuple(
    getattr(callbacks, each) for each in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, each)
)
_COPY = "_average_model"


class WeightAverages:
    """The averages of one run."""

    def __init__(self) -> None:
        self._callbacks: list[Any] = []
        self._dtypes: dict[str, torch.dtype] = {}

    @property
    def are_of_float32(self) -> bool:
        """Whether a callback calls `configure_model` by itself, outside of the Trainer's precision, as `WeightAveraging` does."""
        return any(isinstance(each, _CLASSES[1:]) for each in self._callbacks)

    def defer(self, trainer: Trainer) -> None:
        """Let no callback copy the module in its `setup`. Equal on all ranks.

        Raises:
            SequenceParallelError: a callback has a `setup` of its own.
        """
        self.release()
        every: Any = trainer
        for callback in every.callbacks:
            if not isinstance(callback, _CLASSES):
                continue
            name, own = type(callback).__name__, type(callback).setup
            if own not in [each.setup for each in _CLASSES]:
                raise SequenceParallelError(
                    f"{name}.setup copies the module before its parameters are sharded over {trainer.world_size} ranks: an average's copy is "
                    "made here, after that; do what else it does in on_fit_start"
                )
            callback.setup = _without_a_copy if isinstance(callback, _CLASSES[1:]) else _nothing
            self._callbacks.append(callback)

    def note_dtypes(self, module: LightningModule) -> None:
        """Remember the dtypes of a module whose precision is still the user's: those of a copy."""
        named = chain(module.named_parameters(), module.named_buffers())
        self._dtypes = {user_name(name): tensor.dtype for name, tensor in named} if self._callbacks else {}

    def copy(self, module: LightningModule, trainer: Trainer) -> None:
        """Give each callback a copy of the module's shards. The module is resharded."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        for callback in self._callbacks:
            if isinstance(callback, callbacks.StochasticWeightAveraging):
                average: nn.Module = sharded_weights(module, self._dtypes, copy=True)
            else:
                options = {"use_buffers": callback._use_buffers, **callback._kwargs}
                average = ShardedAverage(
                    sharded_weights(module, self._dtypes), device=callback._device or module.device, **options
                )
            setattr(callback, _COPY, average)

    def fit_state(self, checkpoint: dict[str, Any], module: LightningModule) -> None:
        """Let `WeightAveraging` load the weights that were trained, where the checkpoint's own are their average. The module is resharded."""
        if self._callbacks and "current_model_state" in checkpoint:
            checkpoint["current_model_state"] = sharded_state(module, checkpoint["current_model_state"])

    def release(self) -> None:
        """Give the callbacks their own `setup` back."""
        for callback in self._callbacks:
            vars(callback).pop("setup", None)
        self._callbacks = []


def _nothing(trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
    """Stand for a callback's `setup` that makes its copy alone."""


def _without_a_copy(trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
    """Stand for `WeightAveraging.setup`, which builds the model, in the dtype that it has without the Trainer's precision, and copies it."""
    if stage == "fit" and is_overridden("configure_model", pl_module):
        with trainer.strategy.tensor_init_context(), trainer.strategy.model_sharded_context():
            pl_module.configure_model()


class ShardedWeights(nn.Module):
    """A module's parameters and buffers by the user's names, in the module's order, without its code. It loads whole tensors too."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load tensors by names with those of wrappers or without."""
        return super().load_state_dict(by_user_name(state_dict), strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *options: Any) -> None:
        for name, own in chain(self._parameters.items(), self._buffers.items()):
            if prefix + name in state_dict:
                state_dict[prefix + name] = sharded_like(state_dict[prefix + name], own)
        super()._load_from_state_dict(state_dict, prefix, *options)


def sharded_weights(module: nn.Module, dtypes: Mapping[str, torch.dtype], *, copy: bool = False) -> ShardedWeights:
    """Return the weights of a resharded module.

    Args:
        module: whose tensors they are.
        dtypes: of tensors, by the user's names, that are to have another one than the module's.
        copy: in memory of their own.
    """
    return _weights_of(module, "", dtypes, {}, {}, copy=copy)


def _weights_of(
    module: nn.Module,
    prefix: str,
    dtypes: Mapping[str, torch.dtype],
    modules: dict[nn.Module, ShardedWeights],
    tensors: dict[Tensor, Any],
    *,
    copy: bool,
) -> ShardedWeights:
    """Return the weights of a part of the model; what several modules share is shared."""
    while wrapped := [each for name, each in module._modules.items() if each is not None and not user_name(name)]:
        module = wrapped[0]
    if module in modules:
        return modules[module]
    found = modules[module] = ShardedWeights()
    for name, tensor in chain(module._parameters.items(), module._buffers.items()):
        if tensor is not None and tensor not in tensors:
            values = tensor.detach().to(dtypes.get(prefix + name, tensor.dtype), copy=copy)
            tensors[tensor] = nn.Parameter(values, requires_grad=False) if name in module._parameters else values
        kept = None if tensor is None else tensors[tensor]
        if name in module._parameters:
            found.register_parameter(name, kept)
        else:
            found.register_buffer(name, kept, persistent=name not in module._non_persistent_buffers_set)
    for name, child in module._modules.items():
        if child is not None:
            found.add_module(name, _weights_of(child, f"{prefix}{name}.", dtypes, modules, tensors, copy=copy))
    return found


class ShardedAverage(AveragedModel):
    """torch's averaged model of sharded parameters."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load tensors by names with those of wrappers or without."""
        return super().load_state_dict(by_user_name(state_dict), strict, assign)

    def update_parameters(self, model: nn.Module) -> None:
        """Average the parameters, and then the buffers: torch's operators over lists take sharded tensors or plain ones, not both."""
        if not self.use_buffers or next(model.buffers(), None) is None:
            super().update_parameters(model)
            return
        whole = self.module
        try:
            for buffers in (False, True):
                self.module = _Half(whole, buffers=buffers)
                super().update_parameters(_Half(model, buffers=buffers))
                self.n_averaged -= 1
            self.n_averaged += 1
        finally:
            self.module = whole


class _Half(nn.Module):
    """The parameters of a module without its buffers, or these alone."""

    def __init__(self, module: nn.Module, *, buffers: bool) -> None:
        super().__init__()
        self._whole, self._of_buffers = (module,), buffers

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(()) if self._of_buffers else self._whole[0].parameters()

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return self._whole[0].buffers() if self._of_buffers else iter(())
