"""Devices that compute while the host goes on, CUDA's and others: a value read there makes the host wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """Return whether the host goes on while a device computes."""
    return device.type != "cpu"


def makes_host_wait(tensor: Tensor) -> bool:
    """Return whether the host would wait for a tensor's values."""
    return is_accelerator(tensor.device)


def runtime(device: torch.device) -> Any:
    """Return an accelerator's module of torch: its events, its streams, its random numbers."""
    return torch.get_device_module(device)
