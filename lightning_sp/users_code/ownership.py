"""Which objects, classes and files are the user's own, and no library's: those alone are looked into, and put back."""

from __future__ import annotations

import queue
import sys
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from functools import lru_cache
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

# What torch and Lightning keep in a module for themselves; parameters are put back by their shards.
OF_THE_FRAMEWORK = {*vars(nn.Module()), "_trainer", "_fabric", "_device_mesh"} - {"training", "_buffers"}
# Folders of installed libraries. Their objects may work in threads of their own, so that nothing in them is put back, but for metrics.
_INSTALLED = ("site-packages", "dist-packages")
_NOT_THE_USERS = {*sys.stdlib_module_names, "torch", "lightning_sp"}
# Of libraries, but of Python alone: what a step does to one is in its attributes. An optimizer of a probe, say, that the step itself steps.
_OF_ATTRIBUTES = (
    *(SimpleNamespace, Namespace, UserDict, UserList, ChainMap, queue.Queue),
    *(Optimizer, LRScheduler, GradScaler),
)


def is_object_of_user(value: Any) -> bool:
    """Return whether a value is an object of the user's own, a metric, or another one whose attributes a step may count in."""
    return not isinstance(value, type) and is_kind_of_user(type(value))


def is_kind_of_user(kind: type) -> bool:
    """Return whether objects of a class are the user's own, as `is_object_of_user` has it."""
    known = _by_class(kind)
    return is_class_of_user(kind) if known is None else known


# Trials ask of each value that a module holds, many times.
@lru_cache(maxsize=1024)
def _by_class(kind: type) -> bool | None:
    """Return whether objects of a class are the user's own; None where the file says so that it is in."""
    if issubclass(kind, (Tensor, np.ndarray, dict, list, set, deque, tuple, str, Dataset, FunctionType)):
        return False
    if issubclass(kind, _OF_ATTRIBUTES) or kind.__module__.partition(".")[0] == "torchmetrics":
        return True
    return False if _is_known(kind.__module__) else None


def is_class_of_user(found: type) -> bool:
    """Return whether a class is the user's own: no library's."""
    return is_file_of_user(found.__module__)


def is_file_of_user(module: str) -> bool:
    """Return whether a module of Python's is the user's own: no library's."""
    if _is_known(module):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not any(folder in file for folder in _INSTALLED)


def is_called_by_user() -> bool:
    """Return whether the function that asks was called by a line of the user's own, by no library's."""
    return is_file_of_user(sys._getframe(2).f_globals.get("__name__", ""))


@lru_cache(maxsize=4096)
def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _NOT_THE_USERS


def key_text(key: Any) -> str:
    """Return a key of a dict as a user would write it. That of a weight, by which a step may keep something, is not printed: FSDP2 frees it."""
    return repr(key) if type(key) is str else plain_text(key)


def plain_text(name: Any) -> str:
    """Return an attribute's name or a dict's key in words, as `str` does, but for tensors: their shape."""
    return f"a tensor of shape {tuple(name.shape)}" if isinstance(name, Tensor) else str(name)
