"""Devices that compute while the host goes on, CUDA's and others: a value read there makes the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Where each tensor begins in a buffer of several: what every dtype can be read at.
_ALIGNMENT = 16


def is_accelerator(device: torch.device) -> bool:
    """Return whether the host goes on while a device computes."""
    return device.type != "cpu"


def makes_host_wait(tensor: Tensor) -> bool:
    """Return whether the host would wait for a tensor's values."""
    return is_accelerator(tensor.device)


def copies_on(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors on a device. To an accelerator those of the host go as views of one copy, for which the host does not wait.

    From pinned memory where that is CUDA, else a copy would wait for a staging buffer.
    """
    if not is_accelerator(device):
        return [each.to(device) for each in tensors]
    starts, size = [], 0
    for each in tensors:
        starts.append(size)
        if not makes_host_wait(each):
            size += -(-each.numel() * each.element_size() // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for each, start in zip(tensors, starts, strict=True):
        if not makes_host_wait(each):
            _view(buffer, start, each).copy_(each)
    copied = buffer.to(device, non_blocking=True)
    return [
        each.to(device) if makes_host_wait(each) else _view(copied, start, each)
        for each, start in zip(tensors, starts, strict=True)
    ]


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    end = start + like.numel() * like.element_size()
    return buffer[start:end].view(like.dtype).view(like.shape)


def runtime(device: torch.device) -> Any:
    """Return an accelerator's module of torch: its events, its streams, its random numbers."""
    return torch.get_device_module(device)
