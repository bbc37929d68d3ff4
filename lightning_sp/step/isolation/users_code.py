"""Which objects, classes and files are the user's own, and no library's: those alone are looked into, and put back."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import deque
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

# What torch and Lightning keep in a module for themselves; parameters are put back by their shards.
OF_THE_FRAMEWORK = {*vars(nn.Module()), "_trainer", "_fabric", "_device_mesh"} - {"training", "_buffers"}
# Folders of installed libraries. Their objects may work in threads of their own, so that nothing in them is put back, but for metrics.
_INSTALLED = ("site-packages", "dist-packages")
_NOT_THE_USERS = {*sys.stdlib_module_names, "torch", "lightning_sp"}


def is_object_of_user(value: Any) -> bool:
    """Return whether a value is an object of the user's own, or a metric: one whose attributes a step may count in."""
    if isinstance(value, (Tensor, np.ndarray, dict, list, set, deque, tuple, str, type, Dataset, FunctionType)):
        return False
    if isinstance(value, (SimpleNamespace, Namespace)):
        return True
    return type(value).__module__.partition(".")[0] == "torchmetrics" or is_class_of_user(type(value))


def is_class_of_user(found: type) -> bool:
    """Return whether a class is the user's own: no library's."""
    return is_file_of_user(found.__module__)


def is_file_of_user(module: str) -> bool:
    """Return whether a module of Python's is the user's own: no library's."""
    if module.partition(".")[0] in _NOT_THE_USERS:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not any(folder in file for folder in _INSTALLED)
