"""The meta device for the ranks that receive their weights: a model is built there without memory, but for what is read from a file.

Hugging Face refuses `from_pretrained` under a device context of `torch.device("meta")`: what it reads would be lost. Within it tensors are made
as if there were no context, so that these ranks hold such a model whole until it is sharded, as rank 0 does. So it is within Lightning's
`load_from_checkpoint`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class MetaDevice(TorchFunctionMode):
    """Makes new tensors on the meta device, unless their device is given or a pretrained model is being read.

    No `torch.device("meta")`: to Hugging Face that is a default device, and a context within it would be one to map the model to.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if function in _device_constructors() and kwargs.get("device") is None and not _reads_pretrained():
            kwargs = {**kwargs, "device": torch.device("meta")}
        return function(*args, **kwargs)


def _reads_pretrained() -> bool:
    """Return whether the caller is within Hugging Face's `from_pretrained`, or Lightning's `load_from_checkpoint`."""
    codes = (_from_pretrained(), _load_from_checkpoint())
    frame: FrameType | None = sys._getframe(1) if any(codes) else None
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def _from_pretrained() -> CodeType | None:
    loaded = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return None if loaded is None else inspect.unwrap(loaded.from_pretrained.__func__).__code__


def _load_from_checkpoint() -> CodeType | None:
    saving = sys.modules.get("lightning.pytorch.core.saving")
    return None if saving is None else saving._load_from_checkpoint.__code__
